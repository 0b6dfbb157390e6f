"""Where kernels are stored in panels: on one CPU with a compiler, unless the user refuses."""

import importlib

import jax.numpy as jnp
import pytest

from medusa_jax.cpu import library as kernels
from medusa_jax.errors import UserError
from medusa_jax.model.placing import choose_storage
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import make_mesh

module = importlib.import_module("medusa_jax.cpu.library")


def choose(dtype="float32", weights=None):
    return choose_storage(jnp.dtype(dtype), make_mesh(), weights)


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler")
def test_panels_where_the_kernels_compute(monkeypatch):
    panel = kernels().panel
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
