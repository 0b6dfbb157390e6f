"""Bytes for moments: the levels against their definition, nearest levels, no table look-ups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax.training.optim import dynamic_levels
from medusa_jax.training.optim.dynamic_levels import magnitude

pack, unpack = (
    jax.jit(f, static_argnames="signed")
    for f in (dynamic_levels.pack, dynamic_levels.unpack)
)
BOTH = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def definition(signed):
    """Dettmers et al. 2022, section 2.1, as a table in rising order."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = np.linspace(0.1, 1.0, parts + 1) * 10.0 ** (decade - 6)
        middle = (edges[1:] + edges[:-1]) / 2
        values += [*middle, *(-middle if signed else ())]
    assert len(values) == 256
    return np.sort(np.array(values))


@BOTH
def test_the_levels_are_the_papers(signed):
    codes = np.arange(256, dtype=np.uint8)[None, :]
    # Blocks of 256, all of scale 1.
    scale = {"scale": np.ones((1, 1), np.float32)}
    ours = np.asarray(unpack(codes, scale, signed))[0]
    np.testing.assert_allclose(ours, definition(signed), rtol=1e-6)
    assert float(jax.jit(magnitude, static_argnums=1)(np.int32(-1), signed)) == 0


@BOTH
@settings(deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 9))
def test_packing_is_the_nearest_level_of_the_block(signed, seed, spread):
    rng = np.random.default_rng(seed)
    x = 10.0 ** rng.uniform(-spread, 3, (16, 512))
    x = (x * (rng.choice([-1, 1], x.shape) if signed else 1)).astype(np.float32)
    # Levels and the points between them, where rounding could choose the wrong one.
    table = definition(signed)
    x[0, :256], x[0, 256:511] = table, (table[1:] + table[:-1]) / 2
    codes, scale = pack(jnp.asarray(x), signed)
    assert codes.dtype == jnp.uint8 and scale["scale"].shape == (16, 2)
    restored = np.asarray(unpack(codes, scale, signed)).reshape(16, 2, 256)
    blocks = x.reshape(16, 2, 256).astype(np.float64)
    largest = np.abs(blocks).max(-1, keepdims=True)
    unit = blocks / largest
    off = np.abs(unit[..., None] - table).min(-1)
    if not signed:  # never down to zero
        smallest = (unit > 0) & (unit < table[1] / 2)
        off = np.where(smallest, np.abs(unit - table[1]), off)
    # Everything is scaled to values up to 1.
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(np.abs(restored / largest - unit), off, rtol=0, atol=4 * eps)
