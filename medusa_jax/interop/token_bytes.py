"""The bytes that token ids are written as, and how many of them one token can cover."""

import json
from functools import cached_property
from typing import Any

from medusa_jax.interop.tokenizer import Tokenizer

# Normalizers that never make a text shorter (Replace only of a given string by one no shorter), and
# pre-tokenizers that drop nothing (Split only if it does not remove).
GROWING = {"Sequence", "Prepend", "Replace"}
KEEPING = {"Sequence", "ByteLevel", "Split", "Digits", "Metaspace"}


def byte_characters() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte, as GPT-2 does."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    pairs = [(chr(b), b) for b in shown] + [(chr(256 + i), b) for i, b in enumerate(hidden)]
    return dict(pairs)


class TokenBytes:
    """What the tokens of one tokenizer cover, in bytes of UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of = byte_characters()
        backend = tokenizer.backend
        self._added: dict[int, Any] = backend.get_added_tokens_decoder() if backend else {}
        halves = [tokenizer.token_to_id(half) for half in "Ã©"]  # the bytes of é
        self._byte_level = None not in halves and backend.decode(halves) == "é"

    def of(self, token_id: int) -> bytes:
        """The bytes that a token stands for, be they part of a character only."""
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
        # Of other kinds of vocabularies the decoder knows; sentencepiece writes blanks so.
        return (token.replace("\u2581", " ") if tokenizer.byte_ids else token).encode()

    def least_tokens(self, text: str) -> int:
        """The number of tokens that a text has at least; 0 where it is not known."""
        if self.longest is None:
            return 0
        covered = text.encode().translate(None, self._left_out)
        return -(-len(covered) // self.longest)

    @cached_property
    def longest(self) -> int | None:
        """Most bytes of a text that one token covers; None where that cannot be told.

        It can for BPE over bytes: no unknown token covers a text of any length. No step before BPE
        may shorten the text, no added token may take the blanks next to it along.
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
        """Bytes that a byte-level vocabulary lacks: they may be no part of any token."""
        if not self._byte_level:
            return b""
        words = self._tokenizer.backend.get_vocab()
        return bytes(b for character, b in self._byte_of.items() if character not in words)


def _steps(component: Any) -> list[dict[str, Any]]:
    """The settings of a part of a tokenizer, and of the parts that it consists of."""
    if component is None:
        return []
    found, todo = [], [json.loads(component.__getstate__())]
    while todo:
        step = todo.pop()
        found.append(step)
        todo += [*step.get("normalizers", []), *step.get("pretokenizers", [])]
    return found


def _keeps_length(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(step["content"].encode()) >= len(
            replaced.encode()
        )
    if step["type"] == "Split":
        return step["behavior"] != "Removed"
    return step["type"] in GROWING | KEEPING
