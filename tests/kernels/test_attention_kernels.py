"""The library's attention kernels: which runs where, and that they are asked for what we mean.

No accelerator is needed: splash attention runs interpreted and is lowered for a TPU, and XLA
answers the request that is made to cuDNN.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from children import devices, output_of
from closeness import assert_close
from trees import random_tree

from medusa_jax.kernels import cuda, tpu, tpu_operations
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.kernels.cuda import CudaKernels
from medusa_jax.kernels.tpu import TpuKernels
from medusa_jax.model.grouped import attend
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.masks import CausalMask, tree_mask


@pytest.fixture(autouse=True)
def cudnn_is_here(monkeypatch):
    monkeypatch.setattr(cuda, "has_cudnn", lambda: True)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.parametrize(
    "takes, dtype, T, H, expected",
    [
        (cuda.cudnn_takes, "bfloat16", 2048, 128, True),
        (cuda.cudnn_takes, "float16", 640, 64, True),
        (cuda.cudnn_takes, "float32", 2048, 128, False),
        (cuda.cudnn_takes, "bfloat16", 2047, 128, False),
        (cuda.cudnn_takes, "bfloat16", 2048, 100, False),
        (cuda.cudnn_takes, "bfloat16", 2048, 256, False),
        (cuda.cudnn_takes, "bfloat16", 131072, 128, False),
        (tpu.splash_takes, "bfloat16", 131072, 128, True),
        (tpu.splash_takes, "float32", 2048, 128, False),
        (tpu.splash_takes, "bfloat16", 2000, 128, False),
        (tpu.splash_takes, "bfloat16", 2048, 64, False),
    ],
)
def test_texts_that_the_libraries_kernels_take(takes, dtype, T, H, expected, monkeypatch):
    q = jax.ShapeDtypeStruct((2, T, 4, H), dtype)
    assert takes(q) == expected
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert not takes(q)  # without a mesh the placement of rows is unknown


@pytest.mark.parametrize(
    "B, T, S, expected",
    [
        (2, 64, 1024, True),
        (2, 64, 1000, False),  # whole tiles only
        # One token a row: where the caches of a TPU are long.
        (1, 1, 4096, False),
        (8, 1, 1024, True),
    ],
)
def test_caches_that_the_kernel_takes(B, T, S, expected, monkeypatch):
    """One device and 16 bits for all."""
    q = jax.ShapeDtypeStruct((B, T, 32, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((B, 8, S, 128), jnp.bfloat16)
    assert tpu.kernel_takes(q, k, T) == expected
    single = k.update(dtype=jnp.float32)
    assert not tpu.kernel_takes(q.update(dtype=jnp.float32), single, T)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert not tpu.kernel_takes(q, k, T)


def rows(window, B=2, T=256, N=2, G=1, H=128):
    """Queries, keys and values [B, T, heads, H], and packed segments of which 0 is padding."""
    rng = np.random.default_rng(window)
    q, k, v = (rng.standard_normal((B, T, n, H), np.float32) for n in (N, G, G))
    segments = np.sort(rng.integers(0, 4, (B, T), np.int32), axis=1)[:, ::-1]
    return (q, k, v), CausalMask(jnp.asarray(segments), window)


def attended(kernels, q, k, v, mask):
    out = kernels.attend_text(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
    return out.reshape(q.shape)


def own(q, k, v, mask):
    return attended(CpuKernels(), q, k, v, mask)


@pytest.mark.parametrize("window", [20, *wide(0)])
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(partial(cuda.cudnn_attention, implementation="xla"), id="cudnn"),
        pytest.param(
            partial(tpu_operations.splash, interpret=True),
            id="splash",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_values_and_gradients_are_our_own(run, window):
    """Packed rows with padding, two query heads on one key head."""
    qkv, mask = rows(window)
    weight = np.random.default_rng(9).standard_normal(qkv[0].shape).astype(np.float32)

    def total(f, *qkv):
        out = f(*qkv, mask)
        return (out * weight).sum(), out

    def values(f):
        slope = jax.value_and_grad(partial(total, f), (0, 1, 2), has_aux=True)
        return jax.tree.leaves(jax.jit(slope)(*qkv))

    (_, *got), (_, *expected) = values(run), values(own)
    for a, b in zip(got, expected, strict=True):
        assert np.abs(a - b).max() < 1e-5 * np.abs(b).max()


has_cudnn = cuda.has_cudnn


@pytest.mark.parametrize("found", [True, False])
def test_cudnn_is_asked_for_where_it_is(found, monkeypatch, capsys):
    """JAX raises, such as on a machine that has a GPU's compiler only. One sentence says so, once."""

    def library(q, *_, implementation, **__):
        assert implementation == "cudnn"
        if not found:
            raise RuntimeError("cuDNN not found.")
        return q

    has_cudnn.cache_clear()
    monkeypatch.setattr(cuda, "has_cudnn", has_cudnn)
    qkv, mask = rows(0, T=16, H=8)
    given = *(x.astype(jnp.bfloat16) for x in qkv), mask
    expected = given[0] if found else attended(Kernels(), *given)
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    for _ in range(2):
        assert (attended(CudaKernels(), *given) == expected).all()
    assert capsys.readouterr().err.count("cuDNN was not found") == (not found)
    has_cudnn.cache_clear()
    monkeypatch.setattr(cuda, "before_ampere", lambda: True)  # a T4: JAX would not raise
    assert not has_cudnn()
    has_cudnn.cache_clear()


def test_splash_attention_is_lowered_for_a_tpu():
    """Forward and backward."""
    qkv, mask = rows(100)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in qkv]

    def total(q, k, v):
        return attended(TpuKernels(), q, k, v, mask).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(total, (0, 1, 2)))
    exported = jax.export.export(run, platforms=["tpu"])(*shapes)
    assert exported.mlir_module().count("tpu_custom_call") == 3


ON_A_MESH = """
import jax, numpy as np
from functools import partial
from closeness import assert_close
from test_attention_kernels import cuda, own, rows
from medusa_jax.kernels.by_row import by_row
from medusa_jax.sharding import batch_sharding, make_mesh
mesh = make_mesh((2, 1, 2))
for G in (2, 1):
    qkv, mask = rows(5, T=32, N=4, G=G, H=8)
    placed = jax.device_put((*qkv, mask), batch_sharding(mesh))
    cudnn = partial(cuda.cudnn_attention, implementation="xla")
    def run(q, k, v, mask):
        return by_row(cudnn, q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
    run = jax.jit(run)
    with jax.set_mesh(mesh):
        text, out = run.lower(*placed).compile().as_text(), run(*placed)
    assert "all-gather" not in text
    assert_close(out.reshape(qkv[0].shape), own(*qkv, mask))
"""


@pytest.mark.wide
def test_every_device_takes_its_own_rows():
    """Four devices; the heads are parted where there are two groups, and not where there is one."""
    output_of(ON_A_MESH, xla_flags=devices(4))


def inputs(rng, B, T, N, G, S, H=128):
    q_BTNH, k_BGSH, v_BGSH = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, T, N, H), (B, G, S, H), (B, G, S, H))
    )
    # Slots after the last used one may hold anything.
    start_B = jnp.asarray(rng.integers(0, S - T, size=B), jnp.int32).at[0].set(0)
    return q_BTNH, k_BGSH, v_BGSH, start_B


@pytest.mark.parametrize(
    "B, T, N, G, S, window",
    [
        (2, 9, 4, 2, 384, 0),
        (3, 17, 2, 2, 256, 40),
        *wide((1, 64, 8, 2, 1024, 0), (2, 16, 12, 12, 128, 0), (2, 33, 6, 2, 1536, 100)),
    ],
)
def test_is_attend_for_random_trees_and_ragged_rows(B, T, N, G, S, window):
    rng = np.random.default_rng(T)
    q_BTNH, k_BGSH, v_BGSH, start_B = inputs(rng, B, T, N, G, S)
    own_TT = random_tree(rng, T, 4).mask_MM
    mask_BTS = tree_mask(S, start_B, jnp.asarray(own_TT))
    if window:
        depth_T = own_TT.sum(axis=1)
        oldest_BT = start_B[:, None] + depth_T[None, :] - window
        of_text_BTS = jnp.arange(S)[None, None] < start_B[:, None, None]
        near_BTS = jnp.arange(S)[None, None] > oldest_BT[:, :, None]
        mask_BTS = mask_BTS & (near_BTS | ~of_text_BTS)
    expected = attend(q_BTNH, k_BGSH, v_BGSH, mask_BTS)
    # Blocks of slots after the last used one are not read.
    size = next(size for size in tpu_operations.BLOCKS if S % size == 0)
    unread_BS = np.arange(S)[None] // size > (np.asarray(start_B)[:, None] + T - 1) // size
    junk = (jnp.where(unread_BS[:, None, :, None], jnp.nan, x) for x in (k_BGSH, v_BGSH))
    found = tpu_operations.attend_tree(q_BTNH, *junk, mask_BTS, start_B + T, interpret=True)
    assert_close(found, expected, roundings=64)
