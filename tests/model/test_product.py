"""Products of activations and kernels on every platform and in every form; which form each kernel is stored in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from medusa_jax.kernels.cuda import PRODUCT_ROWS, CudaKernels
from medusa_jax.kernels.one_cpu import PanelKernels
from medusa_jax.model.convert import store
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.stored import Codes, Storage
from medusa_jax.native import library

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(1, 24), (1, 1, 24), (24,), (3, 24)])
@pytest.mark.parametrize("outputs", [(10,), (2, 5)])
def test_a_row_is_multiplied_among_others_on_cuda(shape, outputs):
    """The same values and gradients; one row is the first of several, so that no sum is made of it."""
    x = jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)
    kernel = jnp.asarray(RNG.standard_normal((24, *outputs)), jnp.bfloat16)

    def gradient(kernels):
        def value(x, kernel):
            return jnp.sum(jnp.sin(kernels.product(x, kernel)))

        return jax.grad(value, argnums=(0, 1))(x, kernel)

    product = CudaKernels().product
    wide = (np.asarray(a, np.float32) for a in (x, kernel))
    assert_close(product(x, kernel), np.tensordot(*wide, 1))
    for got, wanted in zip(gradient(CudaKernels()), gradient(Kernels())):
        np.testing.assert_array_equal(got, wanted)
    text = jax.jit(product).lower(x, kernel).as_text()
    one_row = np.prod(shape[:-1], dtype=int) == 1
    assert (f"tensor<{PRODUCT_ROWS}x24x" in text) == one_row
    assert ("optimization_barrier" in text) == one_row
    wide = jax.jit(product).lower(x.astype(jnp.float32), kernel.astype(jnp.float32))
    assert f"tensor<{PRODUCT_ROWS}x24x" not in wide.as_text()  # not measured


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
    product = Kernels().multiply(x, stored, jnp.float32)
    assert_close(product, np.asarray(x, np.float64) @ got)


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
    rounded = half["wide"]["kernel"], half["lm_head"]
    types = {str(x.dtype) for x in jax.tree.leaves(rounded)}
    assert types == {"bfloat16"} and half["wide"]["bias"].dtype == jnp.float32
    if library() is None:
        pytest.skip("no C++ compiler")
    panels = store(params, Storage(panel=4), PanelKernels())
    kinds = (panels["wide"]["kernel"], panels["lm_head"]["down"], panels["lm_head"]["up"])
    assert [(k.form, k.outputs) for k in kinds] == [("float32", n) for n in (6, 4, 5)]
    assert panels["embed"]["embedding"] is params["embed"]["embedding"]
