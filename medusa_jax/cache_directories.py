"""Directories for what later processes reuse: kernels, compiled programs, measurements."""

import atexit
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache


def cache_directory(name: str) -> str:
    """The user's cache directory for one kind of files of this project; made, and closed to other users.

    Kernels and programs in it are run, so links and files of other users are removed from it. Where the home directory
    has no place for it, it is under the directory of temporary files; where that is another user's, a new one of this
    process.
    """
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    if os.environ.get("HOME") == "":
        home = ""  # "~" would be the root directory
    with suppress(OSError):
        root = os.path.join(given if os.path.isabs(given) else home, "medusa_jax")
        if os.path.isabs(root) and (path := _private(root, name)):
            return path
        shared = os.path.join(tempfile.gettempdir(), f"medusa_jax-{os.geteuid()}")
        return _private(shared, name) or _private(_scratch(), name)
    return os.path.join(os.devnull, name)  # no place: nothing is found or written


def _private(root: str, name: str) -> str:
    """A directory in `root`, made if it is missing and closed to others; "" if it cannot be this user's."""
    path = os.path.join(root, name)
    with suppress(OSError):
        for folder in (root, path):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if not _is_own(folder) or os.stat(folder).st_uid != os.geteuid():
                return ""
            was_open = bool(os.stat(folder).st_mode & 0o022)
            os.chmod(folder, 0o700)
        # Others may have exchanged anything in a directory that was open to them.
        for entry in os.scandir(path):
            with suppress(FileNotFoundError):  # another process has removed it
                if was_open or entry.is_symlink() or not _is_own(entry.path):
                    is_folder = entry.is_dir(follow_symlinks=False)
                    (shutil.rmtree if is_folder else os.unlink)(entry.path)
        return path
    return ""


def _is_own(path: str) -> bool:
    """Whether a file, directory or link belongs to this user, and not everyone may write it."""
    about = os.lstat(path)
    writable = about.st_mode & stat.S_IWOTH and stat.S_ISREG(about.st_mode)
    return about.st_uid == os.geteuid() and not writable


@cache
def _scratch() -> str:
    path = tempfile.mkdtemp(prefix="medusa_jax-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
