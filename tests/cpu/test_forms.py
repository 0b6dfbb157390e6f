"""The form of kernels is measured once, kept, and chosen by the rows of plain decoding."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_arch

from medusa_jax.cpu import forms, library
from medusa_jax.errors import UserError
from medusa_jax.measured import DeviceCache
from medusa_jax.model.placing import choose_storage
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import make_mesh

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("seconds", "form"),
    [
        ({"plain": [1.00, 3.0], "native": [1.02, 1.2]}, "native"),  # a draw for one row
        (
            {"plain": [1.00, 3.0], "native": [1.30, 1.2]},
            "plain",
        ),  # plain decoding comes first
        ({"plain": [1.30, 1.0], "native": [1.00, 9.0]}, "native"),
    ],
)
def test_the_fastest_for_one_row_is_taken(seconds, form):
    quiet = np.concatenate([seconds["plain"], seconds["native"]])
    noisy = [quiet + RNG.permutation([0, 0, 5, 5]) for _ in range(20)]
    assert forms.fastest(noisy) == form  # only the minimum counts


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A machine whose measurement says what the test wants; counts how often it is asked."""
    library()  # compiled for all tests, not in this test's directory
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEDUSA_JAX_PRODUCTS")
    times = {"plain": [2.0, 2.0], "native": [1.0, 1.0]}
    asked = []

    def timed(config, dtype, forms_):
        asked.append(config)
        if all(times.values()):
            yield [*times["plain"], *times["native"]]

    monkeypatch.setattr(forms, "time_products", timed)
    monkeypatch.setattr(forms, "library", lambda: library() or pytest.skip("no compiler"))
    return times, asked


def choose(dtype="float32", weights=None, **changes):
    return choose_storage(tiny_arch(**changes), jnp.dtype(dtype), make_mesh(), weights)


def test_it_is_measured_once_for_each_model(measured):
    times, asked = measured
    panel = library().panel
    assert choose() == choose() == Storage(panel)
    assert len(asked) == 1
    times["native"] = [9.0, 9.0]
    assert choose() == Storage(panel)  # kept
    assert choose(d_ff=24) == Storage(0)  # other shapes are other programs
    assert choose(weights="int8") == Storage(0, "int8") and len(asked) == 3
    assert choose("float64") == Storage(0) and len(asked) == 3  # never in panels


def test_a_damaged_note_is_measured_again(measured, tmp_path):
    _, asked = measured
    choose()
    [note] = (tmp_path / "medusa_jax" / "products").iterdir()
    note.write_text('{"form": "tiles"')
    choose()
    assert len(asked) == 2


def test_the_variable_overrides(measured, monkeypatch):
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    assert choose().panel == library().panel
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "plain")
    assert choose() == Storage()
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "tiles")
    with pytest.raises(UserError, match="plain or native, not 'tiles'"):
        choose()
    assert not measured[1]


def test_without_a_compiler_products_are_plain(monkeypatch):
    monkeypatch.setattr(forms, "library", lambda: None)
    monkeypatch.delenv("MEDUSA_JAX_PRODUCTS")
    assert choose(weights="bfloat16") == Storage(0, "bfloat16")
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        choose()


def test_a_machine_too_slow_to_tell_keeps_the_native_products(measured, capsys):
    times, asked = measured
    times["plain"] = []  # not timed before time was up
    assert choose() == Storage(library().panel)
    line = "measuring which products are fastest, once, at most 1.5 s ..."
    assert capsys.readouterr().err.splitlines() == [line]
    times |= {"plain": [1.0, 1.0], "native": [9.0, 9.0]}
    assert choose() == Storage(library().panel) and len(asked) == 1
    with DeviceCache.anew():
        assert choose() == Storage(0)
    assert choose() == Storage(0) and len(asked) == 2


def test_every_case_is_timed_in_every_round(monkeypatch):
    monkeypatch.setattr(forms, "ROUNDS", 2)
    both = (Storage(), Storage(weights="int8"))
    timed = np.array(list(forms.time_products(tiny_arch(), jnp.dtype("float32"), both)))
    assert timed.shape == (2, 2 * len(both)) and (timed > 0).all()
