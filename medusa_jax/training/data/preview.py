"""`--config.data.preview`: print one training sample with its counted tokens marked.

Shows a wrong mask: the loss is computed on exactly the marked tokens.
"""

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, TextIO

import jax.numpy as jnp

from medusa_jax.config import Config
from medusa_jax.errors import UserError
from medusa_jax.heads.registry import drafter_class, whole_config
from medusa_jax.interop.tokenizer import Tokenizer
from medusa_jax.training import losses
from medusa_jax.training.data import sources
from medusa_jax.training.data.rows import token_arrays
from medusa_jax.training.data.tokenise import Encoder, tokenizer_for


class Sample(NamedTuple):
    """The first usable sample of a source: its location, ids, and which of them count."""

    where: str
    ids: Sequence[int]
    counted: Sequence[int]


def preview(cfg: Config, out: TextIO | None = None) -> None:
    """Print the first usable sample of `data.source` and a legend.

    Raises:
      UserError: no source, no tokenizer, or no usable sample.
    """
    out, data = out or sys.stdout, cfg.data
    source = sources.names(data.source)[0]
    tokenizer = tokenizer_for(source, cfg.model.tokenizer or cfg.model.path)
    encode = Encoder(tokenizer, data)
    where, ids, counts = first_sample(source, encode)
    kept = min(len(ids), data.seq_len) if data.packing == "first_fit" else len(ids)
    counted = [c > 0 for c in counts[:kept]]
    if cfg.train.stage == "backbone":
        name, n, ahead = "next-token targets", 1, 1
    else:  # the model is not read; the default shape has the same heads
        drafter = drafter_class(cfg.heads.drafter)(whole_config(cfg.heads), cfg.model.arch)
        n, ahead = drafter.loss_view(cfg.train.levels).n_heads, 2
        name = "targets of head 1" if n == 1 else f"targets of heads 1 ... {n}"
    cut = f", cut from {len(ids)} to data.seq_len" if kept < len(ids) else ""
    print(mark_counted(encode.tokenizer, list(ids[:kept]), counted), file=out)
    print("-" * 60, where, sep="\n", file=out)
    print("counted (the loss is computed on these tokens): ⟦like this⟧", file=out)
    print(f"{kept} tokens{cut}, {sum(counted)} of them counted", file=out)
    print(f"{name}: {pairs(counted, range(ahead, ahead + n))}", file=out)


def mark_counted(tokenizer: Tokenizer, ids: list[int], counted: list[bool]) -> str:
    """Text of the ids, special tokens included, each run of counted ones inside ⟦ ⟧.

    A counted line break is shown as ↵. A character with bytes in several tokens belongs to the run that completes
    it.

    Example: ids of "Hi. Yo</s>" with the last two counted -> "Hi. ⟦Yo</s>⟧".
    """
    text, end, done = "", 0, ""
    for is_counted, group in groupby(counted):
        end += len(list(group))
        upto = tokenizer.decode(ids[:end], skip_special=False)
        if end < len(ids):
            upto = upto.rstrip("\ufffd")
        piece, done = upto[len(done) :], upto
        if is_counted:
            lines = piece.replace("\n", "↵\n").split("\n")
            piece = "\n".join(f"⟦{x}⟧" if x else x for x in lines)
        text += piece
    return text


def pairs(counted: list[bool], offsets: Sequence[int]) -> str:
    """Number of pairs (t, k) of this sample for each loss (see `losses.pair_mask`)."""
    counted_1T = jnp.array([counted], bool)
    ones_1T = jnp.ones(counted_1T.shape, jnp.int32)
    batch = {"tokens": ones_1T, "counted": counted_1T, "segment_ids": ones_1T}
    return " ".join(f"{int(n)}" for n in losses.pair_counts(batch, tuple(offsets)))


def first_sample(source: str, encode: Encoder) -> Sample:
    """The first usable sample of a source."""
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        arrays, _ = token_arrays(source)
        tokens, starts = arrays["tokens.npy"], arrays.get("doc_starts.npy", [0])
        end = int(starts[1]) if len(starts) > 1 else len(tokens)
        counts = arrays.get("counted.npy", [1] * end)
        where = f"sample 0 of {len(starts)} in {source}"
        return Sample(where, tokens[:end].tolist(), [int(c) for c in counts[:end]])
    samples = sources.read_records(source, encode.pack)
    problems = {}
    for number, record in enumerate(samples):
        found = encode(record)
        if found.pieces:
            skipped = f", {number} before it skipped" if number else ""
            where = f"sample {number} of {len(samples)} in {source} ({found.form}){skipped}"
            return Sample(where, *found.pieces[0])
        problems[number] = found.problem
    raise UserError(
        f"none of the {len(samples)} samples of {source} can be used: "
        f"{sources.reasons(problems, samples)}"
    )
