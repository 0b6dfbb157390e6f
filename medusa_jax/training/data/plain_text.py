"""Samples of plain text to tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.text.repetition import repeated_ngram_share
from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.training.data import sources


class Encoded(NamedTuple):
    """A sample: the reason to skip it or "", its pieces (token ids, counted), form and unread fields."""

    problem: str
    pieces: Sequence[tuple[list[int], list[int]]] = ()
    form: str = ""
    unread: Sequence[str] = ()


class TextEncoder:
    """Encodes samples of plain text."""

    def __init__(self, tokenizer: Tokenizer, pack: DataConfig):
        self.tokenizer, self.pack = tokenizer, pack
        end = self.tokenizer.special_texts.get("eos_token", "")
        self.eos = self.tokenizer.token_to_id(end) if end else None

    def __call__(self, record: object) -> Encoded:
        try:
            sample = self.encode(sources.parse(record))
        except UserError as error:
            return Encoded(str(error))
        if sample.problem:
            return sample
        pieces = [piece for piece in sample.pieces if not self.too_repetitive(*piece)]
        problem = "" if pieces else "repeats itself"
        return sample._replace(problem=problem, pieces=pieces)

    def encode(self, record: object) -> Encoded:
        """Encode a parsed sample: a text, or a dictionary with one."""
        fields = record if isinstance(record, dict) else {}
        return self.text(fields.get("text", record))

    def too_repetitive(self, ids: list[int], counted: list[int]) -> bool:
        """Whether the share of repeated 4-grams among counted tokens exceeds `data.max_repeats`."""
        if self.pack.max_repeats >= 1:
            return False
        targets = [i for i, counts in zip(ids, counted) if counts]
        return repeated_ngram_share(targets) > self.pack.max_repeats

    def text(self, text: object) -> Encoded:
        """Encode plain text: every token counts; long texts are cut into pieces of one row each."""
        if not isinstance(text, str) or not text.strip():
            return Encoded("no text")
        ids = self.tokenizer.encode(text, add_bos=True)
        ids += [self.eos] if self.eos is not None else []
        T = self.pack.seq_len if self.pack.packing == "first_fit" else len(ids)
        pieces = [ids[i : i + T] for i in range(0, len(ids), T)]
        return Encoded("", [(piece, [1] * len(piece)) for piece in pieces], "text")
