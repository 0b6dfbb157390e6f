"""Rows of tokens of every source, tokenised once per workdir."""

import dataclasses
import hashlib
import importlib
import json
import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from medusa_jax.config import DataConfig, ModelConfig
from medusa_jax.errors import UserError
from medusa_jax.training.data import sources
from medusa_jax.training.data.rows import ARRAYS, REPORT, TokenRows, write_tokens
from medusa_jax.whole_files import Json, checksum, replacing, write_json

# A source holds tokens, hidden states of a model, or text. Seams: its files choose what reads it.
GIVEN, TEXT = "medusa_jax.training.data.given_states", "medusa_jax.training.data.tokenise"


def with_given_states(data: DataConfig, stage: str) -> DataConfig:
    """`data` with `cache_features` set to the type of given hidden states, if its sources hold any."""
    texts = [*data.source.split(","), *filter(None, [data.eval_source])]
    files = {name: sources.states_in(name.strip()) for name in texts}
    if not any(files.values()):
        return data
    if stage != "medusa1":
        raise UserError(
            f"data.source holds hidden states, of a backbone that does not change: train.stage "
            f"medusa1, not {stage}"
        )
    kind = importlib.import_module(GIVEN).stored_type(files, data.cache_features)
    return dataclasses.replace(data, cache_features=kind)


def texts(
    data: DataConfig, model: ModelConfig, workdir: str, vocab_size: int
) -> list[TokenRows]:
    """Rows of each text of `data.source`."""
    return [
        text_rows(name, data, model, workdir, vocab_size)
        for name in sources.names(data.source)
    ]


def held_out_text(
    data: DataConfig, model: ModelConfig, workdir: str, vocab_size: int
) -> TokenRows | None:
    """Rows of `data.eval_source` in their order; None if it is not set."""
    if not data.eval_source:
        return None
    pack = dataclasses.replace(data, max_samples=data.eval_samples)
    return text_rows(data.eval_source, pack, model, workdir, vocab_size, shuffle=False)


def text_rows(
    source: str, pack: DataConfig, model: ModelConfig, workdir: str, vocab_size: int,
    shuffle: bool = True,
) -> TokenRows:  # fmt: skip
    """Rows of a source."""
    path = token_directory(source, pack, model, workdir)
    states = list(sources.states_in(source, pack.max_samples).values())
    return TokenRows(path, pack, vocab_size, shuffle, states)


def token_directory(source: str, pack: DataConfig, model: ModelConfig, workdir: str) -> str:
    """The token directory of a source, tokenised into the workdir if necessary.

    Raises:
      UserError: the source is unreadable or has no usable sample.
    """
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        return source
    if pack.format == "tokens":
        raise UserError(f"data.format is tokens, but {source} has no tokens.npy")
    states = sources.states_in(source, pack.max_samples)
    path = "" if states else model.tokenizer or model.path
    key = [
        source, stamps(source), path, pack.split, pack.format, pack.chat_template,
        pack.max_samples, pack.seq_len, pack.packing, pack.max_repeats,
        *([(name, os.stat(name).st_mtime_ns) for name in states.values()]),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    directory = os.path.join(workdir, "tokens", digest)
    if jax.process_index() == 0 and not os.path.isdir(directory):
        if states:
            ids, counted = importlib.import_module(GIVEN).texts_in(source, states)
            report = {"source": source, "samples": len(states)}
        else:
            ids, counted, report = importlib.import_module(TEXT).tokenise(
                source, path, pack
            )
        write_directory(directory, ids, counted, report)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"tokens {digest}")
    return directory


def stamps(source: str) -> object:
    """Sizes and modification times of the files of a source."""
    if os.path.isdir(source):
        return [(str(path), stamps(str(path))) for path in sources.files_in(source)]
    stamp = os.stat(source) if os.path.exists(source) else None
    return stamp and (stamp.st_size, stamp.st_mtime_ns)


def write_directory(
    directory: str, ids: list[np.ndarray], counted: list[np.ndarray], report: Json
) -> None:
    """Write a token directory with its checksums, and the directories above it."""
    os.makedirs(os.path.dirname(os.path.abspath(directory)), exist_ok=True)
    with replacing(directory) as new:
        write_tokens(new, ids, counted)
        sums = {name: checksum(os.path.join(new, name)) for name in ARRAYS}
        write_json(os.path.join(new, REPORT), report | {"crc32": sums})
