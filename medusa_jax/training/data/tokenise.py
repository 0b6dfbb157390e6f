"""Texts to tokens."""

import collections
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.config import DataConfig
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.text.tokenizer import load_tokenizer
from medusa_jax.training.data import sources
from medusa_jax.training.data.plain_text import Encoded, TextEncoder
from medusa_jax.training.data.rows import token_arrays
from medusa_jax.whole_files import Json


def tokenise(
    source: str, tokenizer: str, pack: DataConfig
) -> tuple[list[np.ndarray], list[np.ndarray], Json]:
    """Encode the samples of a source, or take a token directory's; bad ones are skipped, counted and reported.

    Samples are encoded by Grain's reader threads, in order.

    Args:
      tokenizer: the tokenizer's path.

    Returns: token ids and which of them count, for each sample, and a report.

    Raises:
      UserError: the source is unreadable or has no usable sample, or no tokenizer is given.
    """
    import grain

    samples, encode = samples_of(source, tokenizer, pack)
    options = grain.ReadOptions(num_threads=min(os.cpu_count() or 1, 16))
    pipeline = grain.MapDataset.source(samples).map(encode).to_iter_dataset(options)
    problems: dict[int, str] = {}
    forms: collections.Counter[str] = collections.Counter()
    unread: collections.Counter[str] = collections.Counter()
    pieces: list[tuple[list[int], list[int]]] = []
    with announced(f"tokenising {source}"):
        for i, sample in enumerate(pipeline):
            if sample.problem:
                problems[i] = sample.problem
            else:
                forms[sample.form] += 1
            pieces += sample.pieces
            unread.update(sample.unread)
    reasons = sources.reasons(problems, samples)
    if not pieces:
        raise UserError(
            f"none of the {len(samples)} samples of {source} can be used: {reasons}"
        )
    kinds = ", ".join(f"{n} x {form}" for form, n in forms.most_common())
    inform(f"{source}: {forms.total()} of {len(samples)} samples used ({kinds})")
    if unread:
        names = ", ".join(f"{name} ({n} samples)" for name, n in unread.most_common())
        inform(f"{source}: fields with text that are not read: {names}")
    if problems:
        inform(f"{source}: {len(problems)} samples skipped ({reasons})")
    ids = [np.asarray(piece, np.int32) for piece, _ in pieces]
    counted = [np.asarray(counts, bool) for _, counts in pieces]
    skipped = dict(collections.Counter(problems.values()))
    report = {"source": source, "samples": len(samples), "skipped": skipped}
    return ids, counted, report


class GivenTokens(TextEncoder):
    """Takes samples of a token directory as they are: slices of its arrays."""

    def __init__(self, directory: str, pack: DataConfig):
        self.pack = pack
        *self.arrays, starts, _ = token_arrays(directory)
        edges = itertools.pairwise([*starts.tolist(), self.arrays[0].size])
        self.samples = [slice(*edge) for edge in edges][: pack.max_samples or None]

    def encode(self, record: Any) -> Encoded:
        ids, counted = (array[record].tolist() for array in self.arrays)
        return Encoded("", [(ids, counted)], "tokens")


def samples_of(
    source: str, tokenizer: str, pack: DataConfig
) -> tuple[Sequence[object], TextEncoder]:
    """The samples of a source and their encoder: of tokens, plain text, or text that may hold conversations.

    Raises:
      UserError: the source is unreadable, or no tokenizer is given for text.
    """
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        given = GivenTokens(source, pack)
        return given.samples, given
    if not tokenizer:
        raise UserError(
            f"{source} needs a tokenizer: set model.tokenizer to a directory or hub id"
        )
    loaded = load_tokenizer(tokenizer)
    samples = sources.read_records(source, pack)
    files = isinstance(next(iter(samples), None), Path)
    if pack.format == "text" or (files and pack.format == "auto"):
        return samples, TextEncoder(loaded, pack)
    from medusa_jax.training.data.conversations import RecordEncoder

    return samples, RecordEncoder(loaded, pack)
