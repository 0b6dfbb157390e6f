"""Commands on a disk that is full soon."""

import shutil
import subprocess

import pytest
from children import run

NAMESPACE = ("unshare", "-rm", "sh", "-c")


def run_on_small_disk(
    size: str, path: object, *command: str
) -> subprocess.CompletedProcess:
    """Run a command while a file system of `size` is mounted at `path`.

    In a separate namespace, in which most users may mount; where one may not, the test is skipped.
    """
    mount = f"mount -t tmpfs -o size={size} none {path} && "
    if (
        not shutil.which("unshare")
        or subprocess.run([*NAMESPACE, mount + "true"]).returncode
    ):
        pytest.skip("nothing can be mounted here")
    return run(*NAMESPACE, mount + 'exec "$0" "$@"', *command)
