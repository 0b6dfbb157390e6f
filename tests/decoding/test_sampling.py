"""Filters against a reference that sorts, and the law of what is sampled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import filtered_scores, sampling_of

from medusa_jax.decoding import sampling as noise
from medusa_jax.decoding.sampling import row_keys
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.kernels.cuda import CudaKernels
from medusa_jax.kernels.tpu import TpuKernels
from medusa_jax.model.kernels import Kernels

gumbel = jax.jit(noise.gumbel, static_argnums=(2, 3))


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """Indices that temperature, top-k, top-p and min-p keep, by sorting; ties are all kept."""
    x = logits / (temperature or 1.0)
    order = np.argsort(-x)
    keep = np.ones(len(x), bool)
    if top_k:
        keep &= x >= x[order[min(top_k, len(x)) - 1]]
    p = np.where(keep, np.exp(x - x.max()), 0)
    p = p / p.sum()
    if top_p < 1:
        order = np.argsort(-p)
        n = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        keep &= p >= p[order[min(n, len(x)) - 1]]
    return set(np.flatnonzero(keep & (p >= min_p * p.max())).tolist())


@pytest.mark.usefixtures("x64")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**20),
    st.sampled_from([1e-4, 0.05, 0.7, 1.0, 3.0, 100.0]),
    st.sampled_from([0, 1, 2, 5, 31, 99]),
    st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from([0, 1, 29]),
)
def test_filters_keep_what_sorting_keeps(seed, temperature, top_k, top_p, min_p, barred):
    """Barred tokens, at minus infinity, are never kept and move no threshold."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal(31)
    logits[rng.choice(31, barred, replace=False)] = -np.inf
    sampling = sampling_of(1, temperature, top_k, top_p, min_p)
    got = filtered_scores(logits[None, None], sampling)[0, 0]
    kept = set(np.flatnonzero(np.isfinite(got)).tolist())
    # Parameters are stored as float32, and so the reference takes them.
    single = [float(np.float32(v)) for v in (temperature, top_p, min_p)]
    expected = kept_by_sorting(logits, single[0], top_k, single[1], single[2])
    assert kept == expected - set(np.flatnonzero(np.isneginf(logits)).tolist())
    assert int(np.argmax(logits)) in kept
    best = sorted(kept)
    np.testing.assert_allclose(np.asarray(got)[best], logits[best] / single[0], rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("temperature", [1e-4, 1.0, 100.0])
def test_filters_in_low_precision(dtype, temperature):
    """A token may differ from the reference only at a cut; the largest is always kept."""
    rng = np.random.default_rng(0)
    for top_k, top_p in ((1, 1.0), (5, 1.0), (0, 0.9), (20, 0.5)):
        rounded = jnp.asarray(4 * rng.standard_normal((1, 1, 500)), dtype)
        logits, wide = rounded.astype(jnp.float32), np.asarray(rounded, np.float64)[0, 0]
        got = filtered_scores(logits, sampling_of(1, temperature, top_k, top_p))[0, 0]
        kept = set(np.flatnonzero(np.isfinite(got)).tolist())
        expected = kept_by_sorting(wide, temperature, top_k, top_p, 0)
        assert int(np.argmax(logits)) in kept
        assert len(kept ^ expected) <= (1 if temperature == 100.0 else 0)


def test_a_nucleus_is_that_of_the_row_alone():
    """Every row's wanted mass is that of its likeliest 100 tokens, up to rounding: whether the next
    one is kept depends on the order of the sums."""
    B, V = 10, 49_152  # enough that XLA would share out a sum among threads
    logits = np.random.default_rng(0).standard_normal((B, 1, V)).astype(np.float32)
    mass = -np.sort(-np.exp(logits - logits.max(-1, keepdims=True)), axis=-1)[:, 0]
    top_p = mass[:, :100].sum(-1) / mass.sum(-1)
    among = filtered_scores(logits, sampling_of(B, top_p=top_p))
    rows = [sampling_of(1, top_p=top_p[b]) for b in range(B)]
    alone = [filtered_scores(logits[b : b + 1], rows[b])[0] for b in range(B)]
    np.testing.assert_array_equal(among, alone)
    nodes = filtered_scores(logits[:, 0][None], sampling_of(1, top_p=top_p[0]))
    np.testing.assert_array_equal(nodes[0, 0], alone[0][0])
    total = jax.jit(CpuKernels().row_sum)(logits)
    assert_close(total, logits.astype(np.float64).sum(-1, keepdims=True), dtype="float32")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernels", [TpuKernels(), CudaKernels()])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_accelerators_keep_the_same_tokens(kernels, dtype):
    """They test the thresholds of several rounds at once, and XLA orders the sums.

    In float32 the order changes a nucleus at its very edge, so only counts (top-k) are compared.
    """
    rng = np.random.default_rng(1)
    logits = (3 * rng.standard_normal((5, 4, 3_000))).astype(dtype)
    logits[0, 0, :2_990] = -np.inf
    logits[1] = np.round(logits[1])  # ties
    top_p = np.array([0.9, 0.5, 0.99, 0.1, 1 - 1e-6], np.float32)
    top_k = np.array([0, 7, 2_999, 1, 0], np.int32)
    settings = [{"top_k": top_k}]
    if dtype == np.float64:
        settings += [{"top_p": top_p}, {"top_k": top_k, "top_p": top_p}]
    for setting in settings:
        given = sampling_of(5, **setting)
        expected = np.asarray(filtered_scores(logits, given))
        assert 0 < np.isfinite(expected).sum() < np.isfinite(logits).sum()
        found = jax.jit(noise.filtered, static_argnums=0)(kernels, logits, given)
        np.testing.assert_array_equal(found, expected)


def test_thresholds_are_exact_in_few_passes():
    """Several rounds at once find what single rounds find; a pass is what costs time."""
    values = np.random.default_rng(0).standard_normal((6, 400)).astype(np.float32)
    passes_of = {CpuKernels(): 32, TpuKernels(): 8, CudaKernels(): 7, Kernels(): 7}
    for kernels, n in passes_of.items():
        passes = []

        def keep(cuts, passes=passes):
            jax.debug.callback(lambda: passes.append(1))
            return [jnp.sum(values >= t, -1, keepdims=True) >= 17 for t in cuts]

        found = noise._largest_threshold(keep, values[:, :1], kernels.thresholds_at_once)
        jax.effects_barrier()
        np.testing.assert_array_equal(found[:, 0], np.sort(values)[:, -17])
        assert len(passes) == n


@pytest.mark.parametrize("bias", [-1e9, -1e30, 1e30, 1e39])
def test_filters_with_a_large_bias(bias):
    """The range of the scores does not blur the cuts, and a bias beyond float32 is the largest score."""
    logits = np.linspace(5, 0, 11, dtype=np.float32)
    with np.errstate(over="ignore"):
        logits[3] = logits[3].astype(np.float64) + bias
    order = np.argsort(-logits, kind="stable").tolist()
    for n in (3, 1):
        found = filtered_scores(logits[None, None], sampling_of(1, 0.5, top_k=n))[0, 0]
        assert np.flatnonzero(found > -np.inf).tolist() == sorted(order[:n])
    found = filtered_scores(logits[None, None], sampling_of(1, 0.5))[0, 0]
    assert int(np.argmax(found)) == order[0]
    assert not np.isnan(jax.nn.log_softmax(found)).any()


def test_ties_at_the_cut_are_kept_together():
    logits = jnp.array([[[1.0, 3.0, 3.0, 3.0, 0.0]]])
    assert np.isfinite(filtered_scores(logits, sampling_of(1, 1.0, top_k=1))).sum() == 3
    assert np.isfinite(filtered_scores(logits, sampling_of(1, 1.0, top_p=0.2))).sum() == 3


@pytest.mark.parametrize("top_p", [0.0, 1e-46, 1e-40])
def test_a_mass_that_rounds_to_nothing_keeps_the_likeliest_token(top_p):
    logits = jnp.array([[[1.0, 0.0, 3.0, 2.0]]])
    found = filtered_scores(logits, sampling_of(1, 1.0, top_p=top_p))
    assert np.flatnonzero(np.isfinite(found)).tolist() == [2]


def test_noise_is_that_of_seed_request_and_position_alone():
    """To the last bit JAX's own Gumbel noise, of all tokens or of some."""
    seeds, requests = np.array([1, 9], np.uint32), np.array([0, 7], np.int32)
    positions, ids = np.array([[3, 4, 900], [4, 5, 9]]), np.array([0, 7, 4_001, 49_151])
    keys = row_keys(seeds, requests)
    found = gumbel(keys, positions, 49_152, np.float32)
    some = jax.jit(noise.gumbel, static_argnums=3)(keys, positions, ids, np.float32)
    for row, at in np.ndindex(2, 3):
        key = jax.random.key(seeds[row])
        for number in (requests[row], positions[row, at]):
            key = jax.random.fold_in(key, number)
        expected = jax.jit(jax.random.gumbel, static_argnums=1)(key, (49_152,))
        np.testing.assert_array_equal(found[row, at], expected)
        np.testing.assert_array_equal(some[row, at], expected[ids])
