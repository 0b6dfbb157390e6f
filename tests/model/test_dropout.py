"""Dropout: the share of zeros, the mean, and what does nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax.model.dropout import dropout, random_words


@pytest.mark.parametrize("rate", [0.05, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("traced", [False, True])
def test_the_share_of_zeros_and_the_mean(rate, traced):
    x = jnp.ones((400, 1000))
    given = jnp.float32(rate) if traced else rate
    out = np.asarray(jax.jit(dropout)(x, given, jax.random.key(0)))
    # 400,000 draws: the standard error of the share is below 0.0008, of the mean below 0.005.
    assert abs(np.mean(out == 0) - rate) < 0.004
    assert abs(out.mean() - 1) < 0.02
    assert len(np.unique(out)) == 2


def dropped(shape, *keys):
    return [np.asarray(dropout(jnp.ones(shape), 0.5, key)) == 0 for key in keys]


@pytest.mark.parametrize("apart", [1, 2, 3, 64, 1000, 4096])
def test_entries_fall_one_by_one(apart):
    """No entry's fate tells of another's, along a row or from row to row."""
    (a,) = dropped((64, 4096), jax.random.key(0))
    flat = a.ravel()
    assert abs(np.mean(flat[apart:] & flat[:-apart]) - 0.25) < 0.005


@pytest.mark.parametrize("apart", [0, 1, 77])
def test_keys_are_independent(apart):
    """Those that count up and those split from one."""
    many = [jax.random.key(0), jax.random.key(1), *jax.random.split(jax.random.key(2))]
    fates = [a.ravel() for a in dropped((256, 1024), *many)]
    for i, a in enumerate(fates):
        for b in fates[:i]:
            both = a[apart:] & b[: len(b) - apart]
            assert abs(np.mean(both) - 0.25) < 0.005


def test_seeds_whose_first_words_are_neighbours():
    """Their words must not be one sequence, moved by one place."""

    def words_of(first, second):
        return np.asarray(random_words(jnp.array([first, second], jnp.uint32), (1000,)))

    assert np.mean(words_of(5, 1)[1:] == words_of(6, 2)[:-1]) < 0.01


def test_each_byte_of_the_words_is_even():
    words = np.asarray(random_words(jnp.array([3, 8], jnp.uint32), (1 << 18,)))
    expected = len(words) / 256
    for shift in (0, 8, 16, 24):
        counts = np.bincount((words >> shift) & 255, minlength=256)
        chi2 = np.sum((counts - expected) ** 2 / expected)
        assert 160 < chi2 < 370  # 255 degrees of freedom: 255 +- 23


def test_no_key_and_rate_zero_do_nothing():
    x = jax.random.normal(jax.random.key(2), (3, 5))
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x
    np.testing.assert_array_equal(dropout(x, jnp.zeros(()), jax.random.key(0)), x)
    assert np.isfinite(np.asarray(dropout(x, 0.999, jax.random.key(0)))).all()


def test_the_type_stays():
    x = jnp.ones((4, 4), jnp.bfloat16)
    assert dropout(x, 0.3, jax.random.key(0)).dtype == jnp.bfloat16
