"""Resolve paths, names and hub ids to local directories."""

import os
import re
from contextlib import suppress

from medusa_jax.errors import UserError, did_you_mean, first_line
from medusa_jax.files.known import file_of, named_model, names

# The folder of named chat templates.
TEMPLATES_FOLDER = "additional_chat_templates"
TEMPLATES = f"{TEMPLATES_FOLDER}/*.jinja"
# A model's configuration and tokenizer.
TOKENIZER_FILES = ["*.json", "*.jinja", TEMPLATES, "*.model", "*.txt"]
# Descriptions of draft heads, and this project's weights of heads.
HEAD_FILES = [
    "heads.json", "heads.safetensors", "tree.json", "config.json", "adapter_config.json", "certificate/*",
]  # fmt: skip
# Files in folders (the hub's `*` matches "/"), and a second copy of the weights in the publisher's layout.
SKIPPED = ["*/*", "consolidated*"]


def resolve(path_or_id: str, files: list[str] | None = None) -> str:
    """A local directory for a path, a name of `known.KNOWN` or a hub id (`owner/name`, optionally `@revision`).

    For a GGUF file this is a directory in the user's cache. From a repository, safetensors weights are downloaded if available, else .bin;
    with `HF_HUB_OFFLINE=1` only the cache is used.

    Args:
      files: glob patterns to fetch instead of a model's configuration, tokenizer and weights.

    Raises:
      UserError: neither a directory nor a readable repository.
    """
    if os.path.isdir(path_or_id):
        return path_or_id
    if row := named_model(path_or_id):
        return _of_gguf(file_of(row), row.sha256)
    if path_or_id.lower().endswith(".gguf"):
        return _of_gguf(path_or_id)
    repo, _, revision = path_or_id.partition("@")
    if os.path.exists(path_or_id):
        raise UserError(
            f"{path_or_id} is a file; give the directory that holds config.json, or a .gguf file"
        )
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        raise UserError(
            f"{path_or_id!r} is not a directory, hub id (owner/name), .gguf file or "
            f"name ({', '.join(names())}){did_you_mean(path_or_id, names())}"
        )
    if files is not None:
        return _snapshot(repo, revision, files)
    directory = _snapshot(repo, revision, [*TOKENIZER_FILES, "*.safetensors"])
    if not any(name.endswith(".safetensors") for name in os.listdir(directory)):
        directory = _snapshot(repo, revision, [*TOKENIZER_FILES, "pytorch_model*.bin"])
    return directory


def _of_gguf(file: str, sha256: str = "") -> str:
    from medusa_jax.files.gguf.directory import make_directory  # only for such files

    return make_directory(file, sha256)


def is_here(path_or_id: str) -> bool:
    """Whether the files of a path or name are on this machine."""
    if row := named_model(path_or_id):
        with suppress(UserError):
            return bool(file_of(row))
    return os.path.exists(path_or_id)


def _snapshot(repo: str, revision: str, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download

    # Errors of the network and the server have no stable type: the hub library changes its HTTP stack between
    # versions.
    try:
        for folders in (False, True):
            if wanted := [x for x in patterns if ("/" in x) == folders]:
                directory = snapshot_download(
                    repo,
                    revision=revision or None,
                    allow_patterns=wanted,
                    ignore_patterns=None if folders else SKIPPED,
                )
        return directory
    except Exception as error:
        raise UserError(
            f"{repo} is no local directory, and the hub could not be read ({type(error).__name__}: {first_line(error)}): check the name and "
            "the network, unset HF_HUB_OFFLINE; for a gated or private repository accept its terms at "
            f"https://huggingface.co/{repo} and run `hf auth login`; or give a local directory instead"
        ) from error
