"""Texts to tokens."""

import collections
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medusa_jax.config import DataConfig
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.text.tokenizer import Tokenizer, load_tokenizer
from medusa_jax.training.data import sources
from medusa_jax.training.data.plain_text import TextEncoder
from medusa_jax.whole_files import Json


def tokenise(
    source: str, tokenizer: str, pack: DataConfig
) -> tuple[list[np.ndarray], list[np.ndarray], Json]:
    """Encode the samples of a source; bad ones are skipped, counted and reported.

    Samples are encoded by Grain's reader threads, in order.

    Args:
      tokenizer: the tokenizer's path.

    Returns: token ids and which of them count, for each sample, and a report.

    Raises:
      UserError: the source is unreadable or has no usable sample, or no tokenizer is given.
    """
    import grain

    loaded = tokenizer_for(source, tokenizer)
    samples = sources.read_records(source, pack)
    encode = encoder_for(samples, loaded, pack)
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


def tokenizer_for(source: str, path: str) -> Tokenizer:
    """The tokenizer at a path.

    Raises:
      UserError: the path is empty, so the source cannot be read.
    """
    if not path:
        raise UserError(
            f"{source} needs a tokenizer: set model.tokenizer to a directory or hub id"
        )
    return load_tokenizer(path)


def encoder_for(
    samples: Sequence[object], tokenizer: Tokenizer, pack: DataConfig
) -> TextEncoder:
    """Return the encoder of these samples: plain text, or text that may hold conversations."""
    files = isinstance(next(iter(samples), None), Path)
    if pack.format == "text" or (files and pack.format == "auto"):
        return TextEncoder(tokenizer, pack)
    from medusa_jax.training.data.conversations import RecordEncoder

    return RecordEncoder(tokenizer, pack)
