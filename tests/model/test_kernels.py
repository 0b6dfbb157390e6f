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

from medusa_jax.model import attention, kernels
from medusa_jax.model.causal import CausalMask, attend_causal


@pytest.mark.parametrize(
    "platform, dtype, T, H, expected",
    [
        ("cuda", "bfloat16", 2048, 128, "cudnn"),
        ("cuda", "float16", 640, 64, "cudnn"),
        ("cuda", "float32", 2048, 128, "own"),
        ("cuda", "bfloat16", 2047, 128, "own"),
        ("cuda", "bfloat16", 2048, 100, "own"),
        ("cuda", "bfloat16", 2048, 256, "own"),
        ("cuda", "bfloat16", 131072, 128, "own"),
        ("rocm", "bfloat16", 2048, 128, "own"),
        ("tpu", "bfloat16", 131072, 128, "splash"),
        ("tpu", "float32", 2048, 128, "own"),
        ("tpu", "bfloat16", 2000, 128, "own"),
        ("tpu", "bfloat16", 2048, 64, "own"),
        ("cpu", "bfloat16", 2048, 128, "own"),
        ("cpu", "float64", 2048, 128, "own"),
    ],
)
def test_choice(platform, dtype, T, H, expected):
    assert kernels.kernel_for(platform, dtype, T, H) == expected


def test_the_librarys_kernels_can_be_switched_off(monkeypatch):
    assert kernels.kernel_for("cuda", jnp.bfloat16, 1024, 128) == "cudnn"
    monkeypatch.setenv("MEDUSA_JAX_ATTENTION", "own")
    assert kernels.kernel_for("cuda", jnp.bfloat16, 1024, 128) == "own"


@pytest.mark.parametrize(
    "platform, asked, T, expected",
    [
        ("cpu", "", 64, "own own"),
        ("cpu", "cudnn", 64, "own own"),
        ("tpu", "", 64, "tree own"),
        ("tpu", "own", 64, "own own"),
        ("cuda", "", 64, "own own"),
        ("cuda", "cudnn", 64, "cudnn cudnn"),
        # Scores of 32 MiB, and a little less.
        ("cuda", "", 128, "cudnn own"),
        ("cuda", "own", 128, "own own"),
        ("rocm", "cudnn", 64, "own own"),
    ],
)
def test_the_choice_for_a_cache(platform, asked, T, expected, monkeypatch):
    """Whole tiles for a TPU; one device and 16 bits for all."""
    monkeypatch.setattr(kernels, "platform", lambda: platform)
    monkeypatch.setattr(kernels, "has_cudnn", lambda: True)
    monkeypatch.setenv("MEDUSA_JAX_ATTENTION", asked)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    q = jax.ShapeDtypeStruct((2, T, 32, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 8, 1024, 128), jnp.bfloat16)
    found = [
        kernels.cached_kernel(q, k.update(shape=(2, 8, S, 128)), T) for S in (1024, 1000)
    ]
    assert found == expected.split()
    single = k.update(dtype=jnp.float32)
    assert kernels.cached_kernel(q, single, T) == "own"
    assert kernels.cached_kernel(q.update(dtype=jnp.float32), single, T) == "own"
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert kernels.cached_kernel(q, k, T) == "own"


@pytest.mark.parametrize(
    "platform, asked, B, S, expected",
    [
        ("tpu", "", 1, 4096, "own"),
        ("tpu", "", 8, 512, "own"),
        ("tpu", "", 8, 1024, "tree"),
        ("tpu", "", 1, 8192, "tree"),
        ("tpu", "own", 8, 4096, "own"),
        ("cuda", "cudnn", 8, 4096, "own"),
        ("cpu", "", 8, 4096, "own"),
    ],
)
def test_the_choice_for_one_token_a_row(platform, asked, B, S, expected, monkeypatch):
    """Plain decoding on a TPU goes through the kernel where the caches are long."""
    monkeypatch.setattr(kernels, "platform", lambda: platform)
    monkeypatch.setenv("MEDUSA_JAX_ATTENTION", asked)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    q = jax.ShapeDtypeStruct((B, 1, 32, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((B, 8, S, 128), jnp.bfloat16)
    assert kernels.cached_kernel(q, k, 1) == expected


def rows(window, B=2, T=256, N=2, G=1, H=128):
    """Queries, keys and values [B, T, heads, H], and packed segments of which 0 is padding."""
    rng = np.random.default_rng(window)
    q, k, v = (rng.standard_normal((B, T, n, H), np.float32) for n in (N, G, G))
    segments = np.sort(rng.integers(0, 4, (B, T), np.int32), axis=1)[:, ::-1]
    return (q, k, v), CausalMask(jnp.asarray(segments), window)


def own(q, k, v, mask):
    return attend_causal(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask).reshape(q.shape)


@pytest.mark.parametrize("window", [20, *wide(0)])
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(partial(kernels.cudnn, implementation="xla"), id="cudnn"),
        pytest.param(
            partial(kernels.splash, interpret=True), id="splash", marks=pytest.mark.wide
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

    (_, *got), (_, *expected) = (
        jax.tree.leaves(
            jax.jit(jax.value_and_grad(partial(total, f), (0, 1, 2), has_aux=True))(*qkv)
        )
        for f in (run, own)
    )
    for a, b in zip(got, expected, strict=True):
        assert np.abs(a - b).max() < 1e-5 * np.abs(b).max()


@pytest.fixture
def rows_on_cuda(monkeypatch):
    """Queries, keys, values and mask in 16 bits, for which cuDNN is wanted."""
    kernels.has_cudnn.cache_clear()
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    qkv, mask = rows(0, T=16, H=8)
    yield (*(x.astype(jnp.bfloat16) for x in qkv), mask)
    kernels.has_cudnn.cache_clear()


def attended(q, k, v, mask):
    out = attention.attend_rows(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
    return out.reshape(q.shape)


@pytest.mark.parametrize("problem", ["cuDNN not found.", "cuDNN is not detected."])
def test_without_cudnn_attention_is_our_own(problem, rows_on_cuda, monkeypatch, capsys):
    """JAX raises, such as on a machine that has a GPU's compiler only. One sentence says so, once."""

    def missing(*_, implementation, **__):
        assert implementation == "cudnn"
        raise RuntimeError(problem)

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    for _ in range(2):
        assert (attended(*rows_on_cuda) == own(*rows_on_cuda)).all()
    assert capsys.readouterr().err.count("cuDNN was not found") == 1


def test_with_cudnn_it_is_asked_for(rows_on_cuda, monkeypatch, capsys):
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **__: q)
    assert (attended(*rows_on_cuda) == rows_on_cuda[0]).all()
    assert not capsys.readouterr().err


def test_splash_attention_is_lowered_for_a_tpu(monkeypatch):
    """Forward and backward, by the layer's own way to it."""
    monkeypatch.setattr(kernels, "platform", lambda: "tpu")
    qkv, mask = rows(100)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in qkv]

    def total(q, k, v):
        out = attention.attend_rows(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
        return out.astype(jnp.float32).sum()

    run = jax.jit(jax.grad(total, (0, 1, 2)))
    exported = jax.export.export(run, platforms=["tpu"])(*shapes)
    assert exported.mlir_module().count("tpu_custom_call") == 3


def test_cudnn_over_a_cache_is_our_own():
    """Random visibility, two query heads on one key head."""
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.standard_normal(shape, np.float32)
        for shape in ((2, 9, 4, 8), (2, 2, 40, 8), (2, 2, 40, 8))
    )
    mask = rng.integers(0, 2, (2, 9, 40)) > 0
    mask[:, :, 0] = True
    found = kernels.cudnn_cached(q, k, v, mask, implementation="xla")
    assert_close(found, attention.attend(q, k, v, mask), roundings=64)


ON_A_MESH = """
import jax, numpy as np
from functools import partial
from closeness import assert_close
from test_kernels import kernels, own, rows
from medusa_jax.sharding import batch_sharding, make_mesh
mesh = make_mesh((2, 1, 2))
for G in (2, 1):
    qkv, mask = rows(5, T=32, N=4, G=G, H=8)
    placed = jax.device_put((*qkv, mask), batch_sharding(mesh))
    run = jax.jit(kernels.on_mesh(partial(kernels.cudnn, implementation="xla"), mesh))
    with jax.set_mesh(mesh):
        text = run.lower(*placed).compile().as_text()
    assert "all-gather" not in text
    assert_close(run(*placed), own(*qkv, mask))
"""


@pytest.mark.wide
def test_every_device_takes_its_own_rows():
    """Four devices; the heads are parted where there are two groups, and not where there is one."""
    output_of(ON_A_MESH, xla_flags=devices(4))
