"""What a backward pass keeps, counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from research.kept import kept_bytes

B, T, D = 2, 8, 16
X = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
ONE = B * T * D * 2


def kernels(n, *, wide=1):
    return [jax.ShapeDtypeStruct((wide * D, D), jnp.float32) for _ in range(n)]


def product(x, kernel):
    wide = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    return wide.astype(x.dtype)


def block(x, kernel):
    return x + jax.nn.silu(product(x, kernel))


def blocks(params, x, _):
    for kernel in params:
        x = block(x, kernel)
    return x


def test_a_residual_block_keeps_its_product_and_what_the_next_one_reads():
    for n in (1, 2, 3):
        # Input, products in 16 bits, sums between blocks.
        assert kept_bytes(blocks, kernels(n), X, None) == (1 + n + (n - 1)) * ONE


def test_norms_and_products_of_arrays_are_computed_again():
    def mlp(params, x, _):
        normed = x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)
        normed = normed.astype(x.dtype)
        gate, up, down = params
        return product(jax.nn.silu(product(normed, gate)) * product(normed, up), down)

    # Input, gate, up, and a sum of squares in float32 for each token.
    assert kept_bytes(mlp, kernels(3), X, None) == pytest.approx(3 * ONE, abs=2 * B * T * 4)


def test_a_checkpoint_keeps_its_input():
    def twice(params, x, _):
        return jax.checkpoint(lambda x: blocks(params, x, None))(block(x, params[0]))

    whole = kept_bytes(lambda p, x, _: blocks([p[0], *p], x, None), kernels(3), X, None)
    assert whole == (1 + 4 + 3) * ONE
    assert kept_bytes(twice, kernels(3), X, None) == (1 + 1 + 1) * ONE


def test_a_longer_concatenation_holds_its_parts():
    def heads(params, x, given):
        two = jnp.concatenate([x, given], axis=-1)
        three = jnp.concatenate([two, given], axis=-1)
        return product(two, params[0]) + product(three, params[1])

    params = [*kernels(1, wide=2), *kernels(1, wide=3)]
    assert kept_bytes(heads, params, X, X) == 3 * ONE
