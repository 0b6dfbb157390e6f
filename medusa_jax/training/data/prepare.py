"""Rows of tokens of every source, tokenised once per workdir."""

import dataclasses
import hashlib
import importlib
import json
import os

import jax
from jax.experimental import multihost_utils

from medusa_jax.config import DataConfig, ModelConfig
from medusa_jax.errors import UserError
from medusa_jax.training.data import sources
from medusa_jax.training.data.rows import TokenRows, write_tokens
from medusa_jax.whole_files import replacing, write_json


def texts(
    data: DataConfig, model: ModelConfig, workdir: str, vocab_size: int
) -> list[TokenRows]:
    """Rows of each text of `data.source`; without `eval_source` all but the share `data.held_out`."""
    part = "train" if data.held_out and not data.eval_source else ""
    return [
        TokenRows(token_directory(name, data, model, workdir), data, vocab_size, part=part)
        for name in sources.names(data.source)
    ]


def held_out_texts(
    data: DataConfig, model: ModelConfig, workdir: str, vocab_size: int
) -> list[TokenRows]:
    """Rows for evaluation, in their order: `data.eval_source`, else the share `data.held_out` of each text.

    Texts without held-out samples are left out.
    """
    found, pack, part = [], data, "held out"
    if data.eval_source:
        found, part = [data.eval_source], ""
        pack = dataclasses.replace(data, max_samples=data.eval_samples)
    elif data.held_out:
        found = sources.names(data.source)
    paths = [token_directory(name, pack, model, workdir) for name in found]
    texts = [TokenRows(path, pack, vocab_size, shuffle=False, part=part) for path in paths]
    return [text for text in texts if text.rows]


def token_directory(source: str, pack: DataConfig, model: ModelConfig, workdir: str) -> str:
    """The token directory of a source, tokenised into the workdir if necessary.

    Raises:
      UserError: the source is unreadable or has no usable sample.
    """
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        return source
    if pack.format == "tokens":
        raise UserError(f"data.format is tokens, but {source} has no tokens.npy")
    path = model.tokenizer or model.path
    key = [
        source, stamps(source), path, pack.split, pack.format, pack.chat_template,
        pack.max_samples, pack.seq_len, pack.packing, pack.max_repeats,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    directory = os.path.join(workdir, "tokens", digest)
    if jax.process_index() == 0 and not os.path.isdir(directory):
        # Seam: a source that holds tokens needs no tokenizer.
        text = importlib.import_module("medusa_jax.training.data.tokenise")
        ids, counted, report = text.tokenise(source, path, pack)
        os.makedirs(os.path.dirname(os.path.abspath(directory)), exist_ok=True)
        with replacing(directory) as new:
            write_tokens(new, ids, counted)
            write_json(os.path.join(new, "report.json"), report)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"tokens {digest}")
    return directory


def stamps(source: str) -> object:
    """Sizes and modification times of the files of a source."""
    if os.path.isdir(source):
        return [(str(path), stamps(str(path))) for path in sources.files_in(source)]
    stamp = os.stat(source) if os.path.exists(source) else None
    return stamp and (stamp.st_size, stamp.st_mtime_ns)
