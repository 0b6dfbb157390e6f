"""The tokens of prompts for filling in the middle, by the names that some tokenizers' files give them."""

from collections.abc import Mapping
from typing import Any

# Known spellings, for files that do not name them; the list is llama.cpp's.
SPELLINGS = {
    "prefix_token": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
    "<|code_prefix|> <|prefix|>",
    "suffix_token": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> "
    "<|code_suffix|> <|suffix|>",
    "middle_token": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> "
    "<|code_middle|> <|middle|>",
    "fill_pad_token": "<|fim_pad|> <fim-pad> <fim_pad>",
    "repository_token": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "file_token": "<|file_sep|>",
}
NEEDED = ("prefix_token", "suffix_token", "middle_token")


def fill_texts(backend: Any, named: Mapping[str, str]) -> dict[str, str]:
    """Return the tokens' texts by name, {} unless all of `NEEDED` exist; they become special tokens.

    Some files, such as Qwen's, do not call them special. Text that spells them would then be read as them, and
    decoded text would contain them.

    Args:
      named: texts that the files name.
    """
    texts = {}
    for name, spellings in SPELLINGS.items():
        known = [named[name]] if name in named else spellings.split()
        found = (text for text in known if backend.token_to_id(text) is not None)
        texts[name] = next(found, "")
    if not all(texts[name] for name in NEEDED):
        return {}
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in (added[text] for text in texts.values() if text in added):
        token.special = True
        backend.add_special_tokens([token])
    return {name: text for name, text in texts.items() if text}
