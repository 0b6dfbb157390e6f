"""A GGUF file as a directory in Hugging Face form, made once and kept in the user's cache."""

import hashlib
import os
import threading

from medusa_jax.cache_directories import cache_directory
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.files.gguf.reader import split_files
from medusa_jax.files.tensors import GGUF_LINK
from medusa_jax.mapped import sha256_of
from medusa_jax.whole_files import replacing

# Part of every directory's name: raise it when a file would be converted differently.
VERSION = 9


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
            import filelock  # only for new files

            from medusa_jax.files.gguf.convert import write_files

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
    sums = [sha256_of(name) for name in split_files(path)]
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()
