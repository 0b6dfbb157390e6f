"""Texts of a run as rows of tokens, tokenised once per workdir."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from medusa_jax import hosts
from medusa_jax.config import DataConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.hub import TOKENIZER_FILES
from medusa_jax.training.data import sources
from medusa_jax.training.data.rows import ARRAYS, TokenRows, token_arrays, write_tokens
from medusa_jax.training.data.tokenise import tokenise
from medusa_jax.whole_files import replacing, write_json


class Texts(NamedTuple):
    """Rows of a run.

    Attributes:
      train: of each text of `data.source`.
      held_out: of each text for evaluation; empty: none is evaluated.
    """

    train: Sequence[TokenRows]
    held_out: Sequence[TokenRows]


def read_texts(data: DataConfig, tokenizer: str, workdir: str, vocab_size: int) -> Texts:
    """Rows to train on, from `data.source`, and to evaluate on: from `data.eval_source`, or a share of each text (`held_out`).

    Rows for evaluation keep their order; texts without held-out samples are left out of them.

    Args:
      tokenizer: its path; "" is enough for token directories.
    """

    def rows(source: str, pack: DataConfig, part: str, shuffle: bool = True) -> TokenRows:
        directory = token_directory(source, tokenizer, pack, workdir)
        text = TokenRows(directory, pack, vocab_size, shuffle, part)
        if text.beyond and part != "held out":
            inform(f"{source}: {text.beyond} counted tokens lie beyond data.seq_len")
        if not text.rows and part != "held out":
            raise UserError(f"{source}: no counted token is left within data.seq_len")
        return text

    names, evaluated = sources.names(data.source), sources.places(data.eval_source)
    divided = bool(data.kept_share)
    train = [rows(name, data, "train" if divided else "") for name in names]
    held_out = []
    if evaluated:
        pack = dataclasses.replace(data, max_samples=data.eval_samples)
        held_out = [rows(name, pack, "", shuffle=False) for name in evaluated]
    elif divided:
        held_out = [rows(name, data, "held out", shuffle=False) for name in names]
        if not any(text.rows for text in held_out):
            inform("nothing is evaluated: data.held_out keeps no counted token")
    return Texts(train, [text for text in held_out if text.rows])


def token_directory(source: str, tokenizer: str, pack: DataConfig, workdir: str) -> str:
    """The token directory of a source, which is made in the workdir unless the source is one and read whole.

    Raises:
      UserError: the source is unreadable or has no usable sample.
    """
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        cut = 0 < pack.max_samples < len(token_arrays(source)[2])
        if not cut and pack.max_repeats >= 1:
            return source
    elif pack.format == "tokens":
        raise UserError(f"data.format is tokens, but {source} has no tokens.npy")
    key = [
        source, stamps(source, *ARRAYS), tokenizer, stamps(tokenizer, *TOKENIZER_FILES, "*/*.jinja"),
        pack.split, pack.format, pack.chat_template, pack.max_samples, pack.seq_len, pack.packing,
        pack.max_repeats,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(key).encode()).digest()[:6]
    # Copies of the files on several machines have other times.
    first_digest = hosts.broadcast_from_first(np.frombuffer(digest, np.uint8))
    name = first_digest.astype(np.uint8).tobytes().hex()
    directory = os.path.join(workdir, "tokens", name)
    if hosts.first() and not os.path.isdir(directory):
        ids, counted, report = tokenise(source, tokenizer, pack)
        with replacing(directory) as new:
            write_tokens(new, ids, counted)
            write_json(os.path.join(new, "report.json"), report)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"tokens {name}")
    return directory


def stamps(path: str, *patterns: str) -> list[tuple[str, int, int]]:
    """Sizes and modification times of a file, or of a directory's `files_in`, or its files of these patterns."""
    matching = [file for pattern in patterns for file in sorted(Path(path).glob(pattern))]
    files = matching or sources.files_in(path) or [Path(path)]
    existing = [file for file in files if file.exists()]
    return [(str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in existing]
