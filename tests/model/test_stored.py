"""Kernels in every form multiply as the kernel itself, and what is stored in which form."""

import jax
import jax.numpy as jnp
import numpy as np
from closeness import assert_close

from medusa_jax.model.stored import Codes, Storage, multiply, store

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
    assert [(k.form, k.outputs) for k in kinds] == [("float32", n) for n in (6, 4, 5)]
    assert panels["embed"]["embedding"] is params["embed"]["embedding"]
