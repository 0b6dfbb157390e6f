"""A GGUF file as a directory in Hugging Face form, made once and kept in the user's cache."""

import hashlib
import json
import os
from typing import Any

import filelock
import numpy as np

from medusa_jax.console import announced, cache_directory
from medusa_jax.errors import UserError
from medusa_jax.formats.gguf.architecture import hf_config, named_tensors, values
from medusa_jax.formats.gguf.reader import read_gguf, split_files
from medusa_jax.formats.gguf.vocabulary import (
    build_tokenizer,
    special_ids,
    token_texts,
    tokenizer_settings,
)
from medusa_jax.interop.shards import save_weights
from medusa_jax.interop.tensors import GGUF_LINK, save_json
from medusa_jax.whole_files import replacing

# Part of every conversion's name: raise it when a file would be converted differently.
VERSION = 3


def converted(path: str, dtype: Any = None, sha256: str = "") -> str:
    """The directory that a GGUF file becomes; it is made if it is not in the cache.

    Keyed by the file's bytes and the type, so a file that has moved is found and one that has
    changed is converted again. A directory appears when it is complete.

    Args:
      dtype: what the weights are stored in; None leaves them where they are: a link to the file is
        next to configuration and tokenizer (`tensors.open_checkpoint`).
      sha256: what the file's checksum must be, if that is known.

    Raises:
      UserError: a file that cannot be read, is damaged, or holds something unknown; the disk
        is full.
    """
    digest = checksum(path)
    if sha256 and digest != sha256:
        raise UserError(
            f"{path} is not the file that is known by this name: its sha256 is {digest}, not "
            f"{sha256}"
        )
    # Blocks unpack to float32, so that float64 has nothing more to say.
    stored = None if dtype is None else np.dtype(dtype)
    stored = np.dtype(np.float32) if stored == np.float64 else stored
    key = f"{digest[:24]}-{VERSION}-{stored.name if stored else 'texts'}"
    directory = os.path.join(cache_directory("gguf"), key)
    if os.path.isdir(directory):
        return _linked(directory, path, dtype)
    try:
        # Held by one process at a time; one that waited finds the directory made.
        with filelock.FileLock(f"{directory}.lock"):
            if not os.path.isdir(directory):
                with announced(f"converting {path}, once"):
                    _make(path, stored, directory)
    except OSError as error:
        raise UserError(f"{directory} could not be written: {error}") from error
    return _linked(directory, path, dtype)


def _linked(directory: str, path: str, dtype: Any) -> str:
    """The directory, in which a link says where the weights are now if it has none itself."""
    link = os.path.join(directory, GGUF_LINK)
    if dtype is not None or os.path.realpath(link) == os.path.realpath(path):
        return directory
    new = f"{link}.{os.getpid()}"
    try:
        # Not where links lead: the hub's cache names files by their checksums, and names tell the parts.
        os.symlink(os.path.abspath(path), new)
        os.replace(new, link)
    except OSError as error:
        raise UserError(f"{link} could not be written: {error}") from error
    return directory


def checksum(path: str) -> str:
    """The sha256 of a file, in hexadecimal digits; of a split model that of its files' sums."""
    sums = []
    for name in split_files(path):
        try:
            with open(name, "rb") as file:
                sums.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise UserError(f"{name} cannot be read: {error.strerror or error}") from error
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


def _make(path: str, dtype: np.dtype | None, directory: str) -> None:
    with replacing(directory) as new:
        os.makedirs(new)
        _convert(path, dtype, new)


def _convert(path: str, dtype: np.dtype | None, directory: str) -> None:
    file = read_gguf(path)
    config = hf_config(file)
    tensors = named_tensors(file, config)
    ids = special_ids(file)
    if (n_tokens := len(token_texts(file))) > config["vocab_size"]:
        raise UserError(
            f"{path} is damaged: {n_tokens} tokens, but embeddings of {config['vocab_size']}"
        )
    tokenizer = json.loads(build_tokenizer(file).to_str())
    save_json(os.path.join(directory, "tokenizer.json"), tokenizer)
    save_json(os.path.join(directory, "tokenizer_config.json"), tokenizer_settings(file))
    save_json(os.path.join(directory, "config.json"), config | ids)
    save_json(os.path.join(directory, "generation_config.json"), ids)
    if dtype is not None:
        save_weights(
            directory,
            {name: tensor.shape for name, tensor in tensors.items()},
            lambda name: values(tensors[name], config).astype(dtype),
            dtype,
        )
