"""Treat special tokens that are spelled out in messages as text, like transformers' `split_special_tokens`.

Those that the chat template writes remain special.
"""

import json
import random
import re
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from medusa_jax.text.jinja import Span
from medusa_jax.text.tokenizer import Tokenizer, encode_text

Message = dict[str, str]

T = TypeVar("T")

# Private-use characters, which have no meaning for templates and tokenizers. Drawn at random in every process, so
# that a text cannot contain a stand-in on purpose. No two stand-ins begin with the same one.
FIRST, PRIVATE = range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)


class LiteralText:
    """Stand-ins for a tokenizer's special tokens, of the same length as their text.

    A template is rendered with stand-ins in the messages, so that only the template writes special tokens. Those
    are replaced by other stand-ins, which a copy of the tokenizer reads as the special tokens, and the messages
    get their text back, which the copy reads as text. So one pass over the whole text gives ids and correct
    offsets.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._backend = tokenizer, tokenizer.backend
        added = self._backend.get_added_tokens_decoder() if self._backend else {}
        special = sorted((t.content for t in added.values() if t.special), key=len)[::-1]
        draw = random.SystemRandom()
        firsts = iter(draw.sample(FIRST, 2 * len(special)))

        def stand_in(text: str) -> str:
            return "".join(
                map(chr, [next(firsts), *draw.choices(PRIVATE, k=len(text) - 1)])
            )

        self._hidden, self._written = (
            {text: stand_in(text) for text in special} for _ in range(2)
        )
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._stand_in = re.compile("|".join(self._hidden.values()) or r"(?!)")
        self._shown = {stand_in: text for text, stand_in in self._hidden.items()}

    def hide(self, value: T) -> T | None:
        """Messages, or another value of JSON, with stand-ins in all texts; None if none are needed.

        Names of fields are unchanged.
        """
        hidden = self._mapped(value)
        return None if hidden == value else hidden

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, str):
            return _replace(self._special, self._hidden, value)
        if isinstance(value, list):
            return [self._mapped(one) for one in value]
        if isinstance(value, dict):
            return {key: self._mapped(one) for key, one in value.items()}
        return value

    def show(self, text: str) -> str:
        """Restore the text of the messages in a rendered text."""
        return _replace(self._stand_in, self._shown, text)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a text without a template; with `add_bos` the tokenizer's prefix comes first."""
        if not self._special.search(text):
            return self._tokenizer.encode(text, add_bos=add_bos)
        return [*(self._tokenizer.prefix if add_bos else ()), *self._encode(text)[0]]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """`Tokenizer.encode_with_offsets` of a rendered text with stand-ins."""
        return self._encode(self.show(_replace(self._special, self._written, text)))

    def _encode(self, text: str) -> tuple[list[int], list[Span]]:
        copy, ids = self._copy
        encoding = encode_text(copy, text)
        return [ids.get(i, i) for i in encoding.ids], encoding.offsets

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer with renamed special tokens, and its added token ids -> the original ids."""
        import tokenizers

        data = json.loads(self._backend.to_str())
        data["post_processor"] = None  # unused, and it names special tokens
        names = {}
        for token in data["added_tokens"]:
            names[token["id"]] = self._written.get(token["content"], token["content"])
            token["content"] = names[token["id"]]
        copy: Any = tokenizers.Tokenizer.from_str(json.dumps(data))
        return copy, {copy.token_to_id(name): i for i, name in names.items()}


@lru_cache(maxsize=4)
def literal_text(tokenizer: Tokenizer) -> LiteralText:
    """The cached `LiteralText` of a tokenizer."""
    return LiteralText(tokenizer)


def _replace(pattern: re.Pattern[str], by: dict[str, str], text: str) -> str:
    return pattern.sub(lambda match: by[match[0]], text)
