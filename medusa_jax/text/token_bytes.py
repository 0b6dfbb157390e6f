"""The UTF-8 bytes of tokens, and the largest number of bytes of a text that one token can cover."""

import json
from functools import cached_property
from typing import Any

from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.whole_files import Json

# Normalizers that never shorten a text (Replace only of a string by one at least as long), and pre-tokenizers that
# drop nothing (Split only if it does not remove).
GROWING = {"Sequence", "Prepend", "Replace"}
KEEPING = {"Sequence", "ByteLevel", "Split", "Digits", "Metaspace"}


def byte_characters() -> dict[str, int]:
    """GPT-2's mapping between bytes and the characters of byte-level vocabularies."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    pairs = [(chr(b), b) for b in shown] + [(chr(256 + i), b) for i, b in enumerate(hidden)]
    return dict(pairs)


class TokenBytes:
    """The UTF-8 bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of = byte_characters()
        backend = tokenizer.backend
        self._added: dict[int, Any] = backend.get_added_tokens_decoder() if backend else {}
        halves = [tokenizer.token_to_id(half) for half in "Ã©"]  # the bytes of é
        self._byte_level = None not in halves and backend.decode(halves) == "é"
        self._decoder = backend and backend.decoder

    def of(self, token_id: int) -> bytes:
        """The bytes of a token, perhaps part of a character."""
        tokenizer = self._tokenizer
        token = tokenizer.backend and tokenizer.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in tokenizer.byte_ids:  # <0xE2>
            return bytes([int(token[3:5], 16)])
        if token_id in self._added:
            return token.encode()
        if self._byte_level and all(c in self._byte_of for c in token):
            return bytes(self._byte_of[c] for c in token)
        # As the decoder writes it within a text: U+2581 may be a blank or a character.
        text = self._decoder.decode(["a", token]) if self._decoder else ""
        return (text[1:] if text.startswith("a") else token).encode()

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text; 0 if unknown."""
        if self.max_bytes is None:
            return 0
        covered = text.encode().translate(None, self._left_out)
        return -(-len(covered) // self.max_bytes)

    @cached_property
    def max_bytes(self) -> int | None:
        """Most bytes of a text that one token covers; None if unknown.

        Known for BPE over bytes, where no unknown token covers text of any length, if no earlier step shortens
        the text and no added token consumes adjacent whitespace.
        """
        backend = self._tokenizer.backend
        if backend is None or type(backend.model).__name__ != "BPE":
            return None
        steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
        over_bytes = self._byte_level or self._tokenizer.byte_ids
        if not over_bytes or not all(_keeps_length(step) for step in steps):
            return None
        if any(token.lstrip or token.rstrip for token in self._added.values()):
            return None
        words = backend.get_vocab()
        added = [len(token.content.encode()) for token in self._added.values()]
        # A byte is a character of byte-level vocabularies.
        size = len if self._byte_level else lambda word: len(word.encode())
        return max(*map(size, words), *added, 1)

    @cached_property
    def _left_out(self) -> bytes:
        """Bytes that are missing from a byte-level vocabulary, so they may be part of no token."""
        if not self._byte_level:
            return b""
        words = self._tokenizer.backend.get_vocab()
        return bytes(b for character, b in self._byte_of.items() if character not in words)


def _steps(component: Any) -> list[Json]:
    """The settings of a component of a tokenizer and of its inner components."""
    if component is None:
        return []
    steps, todo = [], [json.loads(component.__getstate__())]
    while todo:
        step = todo.pop()
        steps.append(step)
        todo += [*step.get("normalizers", []), *step.get("pretokenizers", [])]
    return steps


def _keeps_length(step: Json) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(
            pattern.encode()
        )
    if step["type"] == "Split":
        return step["behavior"] != "Removed"
    return step["type"] in GROWING | KEEPING
