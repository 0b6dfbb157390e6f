"""`--config.data.preview`: print one training sample with its counted tokens marked.

Shows a wrong mask: the loss is computed on exactly the marked tokens.
"""

import json
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, TextIO

import jax.numpy as jnp

from medusa_jax.config import Config
from medusa_jax.errors import UserError
from medusa_jax.interop.tokenizer import Tokenizer, load_tokenizer
from medusa_jax.training.data import prepare, records
from medusa_jax.whole_files import read_text

COUNTED, RESET = "\x1b[30;42m", "\x1b[0m"


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
    out = out or sys.stdout
    tokenizer = load_tokenizer(prepare.tokenizer_path(cfg, prepare.sources(cfg)[0]))
    sample = first_sample(cfg, tokenizer)
    kept = len(sample.ids)
    if cfg.data.packing == "first_fit":
        kept = min(kept, cfg.data.seq_len)
    ids, counted = list(sample.ids[:kept]), [c > 0 for c in sample.counted[:kept]]
    colours = out.isatty() and not os.environ.get("NO_COLOR")
    opening, closing = (COUNTED, RESET) if colours else marks(out)
    print(painted(tokenizer, ids, counted, opening, closing), file=out)
    print("-" * 60, file=out)
    example = f"{opening}like this{closing}"
    print(f"{sample.where}", file=out)
    print(f"counted (the loss is computed on these tokens): {example}", file=out)
    cut = f", cut from {len(sample.ids)} to data.seq_len" if kept < len(sample.ids) else ""
    print(f"{kept} tokens{cut}, {sum(counted)} of them counted", file=out)
    print(pairs_line(cfg, counted), file=out)


def marks(out: TextIO) -> tuple[str, str]:
    """Brackets that replace colours."""
    try:
        "⟦⟧".encode(out.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "[[", "]]"
    return "⟦", "⟧"


def painted(
    tokenizer: Tokenizer, ids: list[int], counted: list[bool], opening: str, closing: str
) -> str:
    """Text of the ids, special tokens included, each run of counted ones inside the marks.

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
            # Mark each line separately: a terminal would colour up to the margin.
            lines = piece.replace("\n", "↵\n").split("\n")
            piece = "\n".join(f"{opening}{x}{closing}" if x else x for x in lines)
        text += piece
    return text


def pairs_line(cfg: Config, counted: list[bool]) -> str:
    """Number of pairs (t, k) of this sample for each loss (see `losses.pair_mask`)."""
    from medusa_jax.heads.registry import drafter_class, whole_config
    from medusa_jax.training import losses

    if cfg.train.stage == "backbone":
        what, offsets = "next-token targets", [1]
    else:  # a preview does not read the model; the default shape does as well
        drafter = drafter_class(cfg.heads.drafter)(whole_config(cfg.heads), cfg.model.arch)
        n = drafter.loss_view(cfg.train.levels).n_heads
        what = "targets of head 1" if n == 1 else f"targets of heads 1 ... {n}"
        offsets = [k + 2 for k in range(n)]
    counted_1T = jnp.array([counted], bool)
    batch = {
        "tokens": jnp.zeros(counted_1T.shape, jnp.int32),
        "counted": counted_1T,
        "segment_ids": jnp.ones(counted_1T.shape, jnp.int32),
    }
    numbers = " ".join(f"{int(n)}" for n in losses.pair_counts(batch, tuple(offsets)))
    return f"{what}: {numbers}"


def first_sample(cfg: Config, tokenizer: Tokenizer) -> Sample:
    """The first usable sample of the first text of `data.source`."""
    source = prepare.sources(cfg)[0]
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        return _first_of_token_directory(source)
    samples = records.read_records(source, cfg.data)
    encode = prepare.Encoder(tokenizer, cfg.data)
    problems = {}
    for number, record in enumerate(samples):
        found = encode(record)
        if found.pieces:
            ids, counted = found.pieces[0]
            skipped = f", {number} before it skipped" if number else ""
            where = f"sample {number} of {len(samples)} in {source} ({found.form}){skipped}"
            return Sample(where, ids, counted)
        problems[number] = found.problem
    raise UserError(
        f"none of the {len(samples)} samples of {source} can be used: "
        f"{records.skipped(problems, samples)}"
    )


def _first_of_token_directory(directory: str) -> Sample:
    from medusa_jax.training.data.rows import ARRAYS, token_arrays

    arrays, _ = token_arrays(directory)
    tokens, counted, starts = (arrays.get(name) for name in ARRAYS)
    assert tokens is not None
    n = 1 if starts is None else len(starts)
    end = int(starts[1]) if starts is not None and len(starts) > 1 else len(tokens)
    marked = [1] * end if counted is None else counted[:end].tolist()
    where = f"sample 0 of {n} in {directory}"
    report = os.path.join(directory, "report.json")
    if os.path.isfile(report):
        where += f" (made from {json.loads(read_text(report)).get('source')})"
    return Sample(where, tokens[:end].tolist(), marked)
