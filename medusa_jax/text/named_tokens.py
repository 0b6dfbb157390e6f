"""The tokens that files beside tokenizer.json name, read as transformers reads them."""

import os
from typing import Any

from medusa_jax.errors import library_errors
from medusa_jax.files.json_files import optional_json

FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# A field of the first file: all added tokens by id. If it is there, the other files are ignored.
LISTED = "added_tokens_decoder"
# Fields with further special tokens: lists, or a table by name.
FURTHER = ("extra_special_tokens", "additional_special_tokens")
# In the order in which they get new ids; other names follow.
STANDARD = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class NamedTokens:
    """The tokens that a directory's files name.

    Attributes:
      settings: the fields of tokenizer_config.json and special_tokens_map.json.
      texts: {"bos_token": "<s>", ...}.

    Raises:
      UserError: the library refuses a token.
    """

    def __init__(self, directory: str) -> None:
        files = [optional_json(os.path.join(directory, name)) for name in FILES]
        self._is_complete = LISTED in files[0]
        settings, older, added = [files[0], {}, {}] if self._is_complete else files
        self.settings = settings | older
        named = {name: self.settings.get(name) for name in STANDARD}
        for name, value in (older | settings).items():
            if name.endswith("_token") and isinstance(value, str | dict):
                named.setdefault(name, value)
        further = [file.get(field) for file in (settings, older) for field in FURTHER]
        named |= next((some for some in further if isinstance(some, dict)), {})
        more = next((some for some in further if some and isinstance(some, list)), [])
        with library_errors(f"{directory}: its files name tokens that cannot be read"):
            by_name = {name: _token(v) for name, v in named.items() if v is not None}
            self.texts: dict[str, str] = {name: t.content for name, t in by_name.items()}
            self._special = dict.fromkeys([*by_name.values(), *map(_token, more)])
            special = {token.content for token in self._special}
            listed = settings.get(LISTED) or {
                i: {"content": t, "normalized": t not in special, "special": t in special}
                for t, i in added.items()
            }
            self._listed = {int(i): _token(value) for i, value in listed.items()}

    def add_to(self, backend: Any) -> None:
        """Add the tokens to a `tokenizers.Tokenizer` that was read from tokenizer.json."""
        known = {t.content: t for t in backend.get_added_tokens_decoder().values()}
        others = {} if self._is_complete else backend.get_added_tokens_decoder()
        added = [token for _, token in sorted((self._listed | others).items())]
        texts = {*known, *(token.content for token in added)}
        added += [token for token in self._special if token.content not in texts]
        special = {*self.texts.values(), *(text for text in known if known[text].special)}
        for token in added:
            token.special = token.special or token.content in special
        backend.add_tokens([t for t in added if t != known.get(t.content)])


def _token(value: object) -> Any:
    import tokenizers

    fields: Any = value if isinstance(value, dict) else {"content": value, "special": True}
    return tokenizers.AddedToken(**{flag: fields[flag] for flag in FLAGS if flag in fields})
