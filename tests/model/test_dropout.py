"""Dropout: the share of zeros, the mean, and what does nothing."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax.model.dropout import dropout, random_words

words_of = jax.jit(random_words, static_argnums=1)


@pytest.mark.parametrize(("rate", "traced"), [(0.05, False), (0.5, True), (0.9, False)])
def test_the_share_of_zeros_and_the_mean(rate, traced):
    x = np.ones((400, 1000), np.float32)
    if traced:
        out = jax.jit(dropout)(x, np.float32(rate), jax.random.key(0))
    else:
        out = jax.jit(lambda x, key: dropout(x, rate, key))(x, jax.random.key(0))
    out = np.asarray(out)
    # 400,000 draws: the standard error of the share is below 0.0008, of the mean below 0.005.
    assert abs(np.mean(out == 0) - rate) < 0.004
    assert abs(out.mean() - 1) < 0.02
    assert len(np.unique(out)) == 2


@partial(jax.jit, static_argnums=0)
def dropped(shape, key):
    return dropout(jnp.ones(shape), 0.5, key) == 0


def test_entries_are_independent():
    """Along a row, from row to row, and of keys that count up or are split from one."""
    flat = np.ravel(dropped((64, 4096), jax.random.key(0)))
    for apart in (1, 2, 64, 4096):
        assert abs(np.mean(flat[apart:] & flat[:-apart]) - 0.25) < 0.005
    many = [jax.random.key(0), jax.random.key(1), *jax.random.split(jax.random.key(2))]
    masks = [np.ravel(dropped((256, 1024), key)) for key in many]
    pairs = itertools.combinations(masks, 2)
    for (a, b), apart in itertools.product(pairs, (0, 1, 77)):
        both = a[apart:] & b[: b.size - apart]
        assert abs(np.mean(both) - 0.25) < 0.005


def test_each_byte_of_the_words_is_even():
    words = np.asarray(words_of(np.array([3, 8], np.uint32), (1 << 18,)))
    expected = len(words) / 256
    for shift in (0, 8, 16, 24):
        counts = np.bincount((words >> shift) & 255, minlength=256)
        chi2 = np.sum((counts - expected) ** 2 / expected)
        assert 160 < chi2 < 370  # 255 degrees of freedom: 255 +- 23


def test_no_key_and_rate_zero_do_nothing():
    x, run = np.random.default_rng(2).standard_normal((3, 5), np.float32), jax.jit(dropout)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x
    np.testing.assert_array_equal(run(x, np.float32(0), jax.random.key(0)), x)
    assert np.isfinite(run(x, np.float32(0.999), jax.random.key(0))).all()
    assert run(x.astype(jnp.bfloat16), 0.3, jax.random.key(0)).dtype == jnp.bfloat16
