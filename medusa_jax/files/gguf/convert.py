"""A GGUF file as a directory in Hugging Face form, made once and kept in the user's cache."""

import hashlib
import json
import os
import threading

import filelock

from medusa_jax.cache_directories import cache_directory
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.files.gguf.architecture import hf_config, hf_tensors
from medusa_jax.files.gguf.reader import GGUFFile, read_gguf, split_files
from medusa_jax.files.gguf.vocabulary import (
    build_tokenizer,
    special_ids,
    token_texts,
    tokenizer_settings,
)
from medusa_jax.files.hf_config import family_of, parse_config
from medusa_jax.files.hf_keys import locate
from medusa_jax.files.json_files import save_json
from medusa_jax.files.source import Source
from medusa_jax.files.stored_forms import as_llama
from medusa_jax.files.tensors import GGUF_LINK
from medusa_jax.mapped import content_of
from medusa_jax.model.convert import abstract_params
from medusa_jax.whole_files import Json, replacing

# Names of sampling options in GGUF metadata -> in generation_config.json.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Part of every directory's name: raise it when a file would be converted differently.
VERSION = 7


def make_directory(path: str, sha256: str = "") -> str:
    """The cached directory of a GGUF file: configuration, tokenizer and a link to the file.

    Its name contains the checksum, so a file that has moved is found and a changed one is converted again. The weights
    stay in the file (`tensors.open_checkpoint`). A directory appears when it is complete.

    Args:
      sha256: the expected checksum, if it is known.

    Raises:
      UserError: a file that cannot be read, is damaged, or contains something unknown; the disk is full.
    """
    try:
        digest = checksum(path)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    if sha256 and digest != sha256:
        raise UserError(
            f"{path} is not the file that is known by this name: its sha256 is {digest}, not "
            f"{sha256}"
        )
    directory = os.path.join(cache_directory("gguf"), f"{digest[:24]}-{VERSION}-texts")
    try:
        if not os.path.isdir(directory):
            # One process at a time; those that waited find the directory made.
            with filelock.FileLock(f"{directory}.lock"):
                if not os.path.isdir(directory):
                    with announced(f"converting {path}, once"), replacing(directory) as tmp:
                        os.makedirs(tmp)
                        write_files(path, tmp)
        _link(directory, path)
    except OSError as error:
        raise UserError(f"{directory} could not be written: {error}") from error
    return directory


def _link(directory: str, path: str) -> None:
    """Point the link in a directory to the weights."""
    link = os.path.join(directory, GGUF_LINK)
    if os.path.realpath(link) != os.path.realpath(path):
        name = f"{link}.{os.getpid()}.{threading.get_ident()}"
        # The links in the hub's cache lead to files that are named by checksums; the names here tell the parts.
        os.symlink(os.path.abspath(path), name)
        os.replace(name, link)


def checksum(path: str) -> str:
    """The sha256 of a file, in hexadecimal digits; for a split model, of its files' checksums."""
    sums = [content_of(name) for name in split_files(path)]
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


def write_files(path: str, directory: str) -> None:
    """Write configuration and tokenizer of a GGUF file, after a check of its tensors' names and shapes."""
    file = read_gguf(path)
    config = hf_config(file) | {"_name_or_path": names_of(file)}
    llama = parse_config(path, config)
    tensors = as_llama(hf_tensors(file, config), family_of(path, config), llama)
    Source(source=path, tensors=tensors, locate=locate).keys(abstract_params(llama))
    ids = special_ids(file)
    if (n_tokens := len(token_texts(file))) > config["vocab_size"]:
        raise UserError(
            f"{path} is damaged: {n_tokens} tokens, but embeddings of {config['vocab_size']}"
        )
    tokenizer = json.loads(build_tokenizer(file).to_str())
    save_json(os.path.join(directory, "tokenizer.json"), tokenizer)
    save_json(os.path.join(directory, "tokenizer_config.json"), tokenizer_settings(file))
    save_json(os.path.join(directory, "config.json"), config | ids)
    save_json(os.path.join(directory, "generation_config.json"), ids | sampling_of(file))


def names_of(file: GGUFFile) -> str:
    """The model's names in the file's metadata, such as "Qwen2.5 0.5B Instruct Qwen2.5 Instruct"."""
    keys = ("name", "basename", "finetune")
    return " ".join(str(file.values.get(f"general.{key}", "")) for key in keys).strip()


def sampling_of(file: GGUFFile) -> Json:
    """The sampling defaults in the file's metadata, as generation_config.json has them; others by their key."""
    prefix = "general.sampling."
    values = {
        k.removeprefix(prefix): v for k, v in file.values.items() if k.startswith(prefix)
    }
    if values.get("penalty_last_n") == 0:  # the window of llama.cpp's penalty
        values.pop("penalty_repeat", None)
    if values.get("penalty_repeat") in (None, 1):
        values.pop("penalty_last_n", None)
    defaults = {SAMPLING.get(key, prefix + key): value for key, value in values.items()}
    is_sampled = {"temperature", "top_k", "top_p", "min_p"} & defaults.keys()
    return {"do_sample": True} | defaults if is_sampled else defaults
