"""Kernels in every form multiply as the kernel itself, and what is stored in which form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from medusa_jax.errors import UserError
from medusa_jax.measured import DeviceCache
from medusa_jax.model import forms
from medusa_jax.model.stored import Codes, Panels, Storage, multiply, store
from medusa_jax.native import library
from medusa_jax.sharding import make_mesh

RNG = np.random.default_rng(0)


def kernel_of(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def test_int8_codes_are_within_half_a_code():
    kernel = kernel_of(48, 10)
    stored = store({"kernel": kernel}, Storage(weights="int8"))["kernel"]
    assert isinstance(stored, Codes) and stored.codes.dtype == jnp.int8
    got = np.asarray(stored.codes) * np.asarray(stored.scales)
    step = np.abs(kernel).max(axis=0) / 127
    assert (np.abs(got - kernel) <= 0.501 * step).all()
    x = kernel_of(3, 48)
    assert_close(multiply(x, stored, jnp.float32), np.asarray(x, np.float64) @ got)


def test_what_is_stored_in_a_form():
    params = {
        "wide": {"kernel": kernel_of(8, 1, 6), "bias": kernel_of(6)},  # fused
        "embed": {"embedding": kernel_of(5, 8)},
        "lm_head": {"down": kernel_of(8, 4), "up": kernel_of(4, 5)},
    }
    plain = store(params, Storage())
    jax.tree.map(np.testing.assert_array_equal, plain, params)
    half = store(params, Storage(weights="bfloat16"))
    assert half["wide"]["kernel"].shape == (8, 1, 6)
    types = {
        str(x.dtype) for x in jax.tree.leaves((half["wide"]["kernel"], half["lm_head"]))
    }
    assert types == {"bfloat16"} and half["wide"]["bias"].dtype == jnp.float32
    panels = store(params, Storage(panel=4))
    kinds = (panels["wide"]["kernel"], panels["lm_head"]["down"], panels["lm_head"]["up"])
    assert [k.outputs for k in kinds if isinstance(k, Panels)] == [6, 4, 5]
    assert panels["embed"]["embedding"] is params["embed"]["embedding"]


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
    from tiny import tiny_arch

    return forms.choose_storage(
        tiny_arch(**changes), jnp.dtype(dtype), make_mesh(), weights
    )


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
    from tiny import tiny_arch

    monkeypatch.setattr(forms, "ROUNDS", 2)
    both = (Storage(), Storage(weights="int8"))
    timed = np.array(list(forms.time_products(tiny_arch(), jnp.dtype("float32"), both)))
    assert timed.shape == (2, 2 * len(both)) and (timed > 0).all()
