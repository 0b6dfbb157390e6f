"""The kernels as a processor without AVX-512 compiles them: other vectors, panels and blocks of rows."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from children import environment

from medusa_jax.console import processor
from medusa_jax.native import library

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
CHILD = """
import sys

import pytest

from medusa_jax.native import library

assert library().panel == 16, "two vectors of eight"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
# Products with rows that fill the registers of AVX2 and not, a layer, and bits in any company.
CHOSEN = "13-50-150 or (in_one_call and int8) or every_number"


@pytest.mark.skipif(
    library() is None or COMPILER is None or platform.machine() != "x86_64",
    reason="no x86 compiler",
)
def test_the_kernels_built_for_avx2(tmp_path):
    if "avx2" not in processor():
        pytest.skip("this processor has no AVX2")
    env = environment() | {
        "CXX": f"{COMPILER} -mno-avx512f",  # stands against -march=native
        "XDG_CACHE_HOME": str(tmp_path),
    }
    tests = str(Path(__file__).with_name("test_native.py"))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tests, "-k", CHOSEN],
        env=env, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
