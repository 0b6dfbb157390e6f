"""The compiled kernels: where they are used, and in the user's cache made once, and again where they are damaged."""

import ctypes
import importlib
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

import medusa_jax.compiler as made
from medusa_jax.compiler import find_or_compile
from medusa_jax.errors import UserError
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.convert import choose_storage
from medusa_jax.model.stored import Storage
from medusa_jax.native import library
from medusa_jax.sharding import make_mesh

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
# The package's name for it is the function.
module = importlib.import_module("medusa_jax.native")
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then cat {folder}/version; exit; fi
case "$*" in *-shared*) echo >> {folder}/runs;; esac
for last; do :; done
cp {good} "$last"
"""
DAMAGE = {
    "cut short": lambda data: data[:5000],
    "zeros": lambda data: bytes(len(data)),
    "garbage": lambda data: b"\xff" * 100 + data[100:],
    "empty": lambda data: b"",
    "others could write it": bytes,
    "one bit": lambda data: data[:70_000] + bytes([data[70_000] ^ 1]) + data[70_001:],
}


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A folder with a compiler that takes no time, and counts how often it links; an empty cache."""
    program = tmp_path / "compiler"
    program.write_text(COMPILER.format(folder=tmp_path, good=library().path))
    program.chmod(0o755)
    (tmp_path / "version").write_text("1")
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def runs(folder):
    return (folder / "runs").read_text().count("\n")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_made_again(damage, compiler):
    path = find_or_compile("kernels")
    assert path.stat().st_mode & 0o077 == 0
    good = path.read_bytes()
    path.write_bytes(DAMAGE[damage](good))
    if damage == "others could write it":
        path.chmod(0o766)
    again = find_or_compile("kernels")
    assert again.read_bytes() == good and runs(compiler) == 2
    assert ctypes.CDLL(str(again)).medusa_panel_width() == library().panel
    assert find_or_compile("kernels") == again and runs(compiler) == 2
    assert list(again.parent.iterdir()) == [again]


def test_other_flags_processors_and_compilers_make_another(compiler, monkeypatch):
    paths = [find_or_compile("kernels"), find_or_compile("kernels")]
    assert paths[0] == paths[1]
    monkeypatch.setattr(made, "FLAGS", (*made.FLAGS, "-g"))
    paths.append(find_or_compile("kernels"))
    monkeypatch.setattr(made, "processor", lambda: "another")
    paths.append(find_or_compile("kernels"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    paths.append(find_or_compile("kernels"))
    (compiler / "version").write_text("2")
    made._version.cache_clear()
    paths.append(find_or_compile("kernels"))
    assert len(set(paths)) == runs(compiler) == 5
    # A compiler that is gone since has left what can be used.
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert find_or_compile("kernels") in paths[-2:]


def test_a_compiler_that_is_no_command(monkeypatch):
    for malformed in ("g++ '", 'c++ "-O2', "c++ \\"):
        monkeypatch.setenv("CXX", malformed)
        with pytest.raises(UserError, match="CXX is no command"):
            find_or_compile("kernels")


def choose(dtype="float32", weights=None):
    number, mesh = jnp.dtype(dtype), make_mesh()
    kernels = choose_kernels(mesh, number, head_dim=32)
    return choose_storage(kernels, number, mesh, weights)


def test_panels_where_the_kernels_compute(monkeypatch):
    panel = library().panel
    for asked in ("", "native"):
        monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", asked)
        assert choose() == Storage(panel)
        assert choose(weights="int8") == Storage(panel, "int8")
        assert choose("float64") == Storage(0)
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "plain")
    assert choose() == Storage()
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "tiles")
    with pytest.raises(UserError, match="plain or native, not 'tiles'"):
        choose()


def test_without_a_compiler_products_are_plain(monkeypatch):
    monkeypatch.setattr(module, "library", lambda: None)
    monkeypatch.delenv("MEDUSA_JAX_PRODUCTS")
    assert choose(weights="bfloat16") == Storage(0, "bfloat16")
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        choose()


FIRST_START = """
import sys
from medusa_jax import compiler

compiler.begin()
assert "jax" not in sys.modules
from pathlib import Path

import numpy as np
from medusa_jax.native import loaded
from medusa_jax.cpu.panels import Panels, in_panels

words = in_panels(np.ones((8, 3), np.float32), loaded().panel)
made = Panels(words, None, "float32", 8, 3, 16).product(np.ones((1, 8), np.float32))
assert made.tolist() == [[8, 8, 8]]
print(sorted(p.stem.split("-")[0] for p in Path(loaded().path).parent.iterdir()))
"""


@pytest.mark.wide
def test_a_first_start_compiles_what_it_needs(tmp_path):
    """Before JAX is imported, and says how long it took; later starts say nothing."""
    run = [sys.executable, "-c", FIRST_START]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    told = []
    for _ in range(2):
        done = subprocess.run(run, env=env, capture_output=True, text=True)
        assert done.stdout == "['float32_0', 'kernels']\n", done.stderr
        told.append(
            re.findall("compiling kernels for this processor, once: .* s", done.stderr)
        )
    assert [*map(len, told)] == [1, 0]
