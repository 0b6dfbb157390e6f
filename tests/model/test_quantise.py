"""Quantised kernels against independent oracles, and what the compiler keeps of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close

from medusa_jax.config import LlamaConfig
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.model.masks import CausalMask
from medusa_jax.model.quantise import (
    dequantise,
    dequantise_backbone,
    quantise,
    quantise_backbone,
)

# The sixteen levels as QLoRA's appendix E prints them.
LEVELS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
     -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
     0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip


def gaussian(n_in=256, n_out=48, seed=0):
    return np.random.default_rng(seed).normal(size=(n_in, n_out)).astype(np.float32)


def restored(kernel, kind):
    stored = jax.jit(quantise, static_argnums=1)(kernel, kind)
    back = jax.jit(dequantise, static_argnums=2)
    return np.asarray(back(stored["codes"], stored["scales"], jnp.float32)), stored


def test_nf4_is_the_nearest_level_of_its_block():
    """Element by element in plain Python, blocks of 64 inputs, scales rounded to bfloat16."""
    kernel = gaussian()
    ours, stored = restored(kernel, "nf4")
    assert stored["codes"].dtype == jnp.uint8 and stored["codes"].shape == (128, 48)
    assert stored["scales"].shape == (4, 48)
    for block in range(4):
        for column in (0, 17, 47):
            part = kernel[64 * block : 64 * block + 64, column]
            scale = float(jnp.bfloat16(np.abs(part).max()))
            nearest = [LEVELS[np.argmin(np.abs(LEVELS - w / scale))] for w in part]
            mine = ours[64 * block : 64 * block + 64, column]
            assert_close(mine, scale * np.array(nearest), roundings=1)
    size = stored["codes"].nbytes + stored["scales"].nbytes
    assert size / kernel.size == pytest.approx(0.53125)


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.008), ("nf4", 0.096)])
def test_the_error_on_gaussian_weights(kind, error):
    """Relative Frobenius error: 0.7% and 9.2% as published for these formats."""
    kernel = gaussian(1024, 64)
    ours, _ = restored(kernel, kind)
    relative = np.linalg.norm(ours - kernel) / np.linalg.norm(kernel)
    assert 0.5 * error < relative < error


def test_odd_widths_and_zero_blocks():
    kernel = gaussian(24, 5)
    kernel[:, 2] = 0.0
    for kind in ("int8", "nf4"):
        ours, _ = restored(kernel, kind)
        assert ours.shape == (24, 5) and (ours[:, 2] == 0).all()


CONFIG = LlamaConfig(
    vocab_size=64, d_model=128, n_layers=3, n_heads=2, n_kv_heads=2, head_dim=64, d_ff=512,
    max_position=64,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["nf4", *wide("int8")])
def test_a_quantised_backbone_computes_with_its_dequantised_kernels(kind):
    params = init_params(CONFIG, jax.random.key(0))
    stored = jax.jit(quantise_backbone, static_argnums=1)(params, kind)
    mlp = stored["layers_2"]["mlp"]
    assert "codes" in mlp["down_proj"] and "kernel" not in mlp["up_proj"]
    assert "kernel" in stored["lm_head"]
    ones = np.ones((1, 8), np.int32)
    rows = ones, np.arange(8, dtype=np.int32)[None], ones

    def hidden(p):
        return Llama(CONFIG).apply({"params": p}, *rows, method="forward")

    plain = jax.jit(lambda p: hidden(dequantise_backbone(p)))
    assert_close(jax.jit(hidden)(stored), plain(stored))


@pytest.mark.wide
def test_the_float_kernels_of_all_layers_never_exist_at_once():
    """Compiled peak memory of a gradient through the layers, against the float kernels' size."""
    shapes = jax.eval_shape(lambda k: init_params(CONFIG, k), jax.random.key(0))
    kernels = 3 * 4 * (4 * 128 * 128 + 3 * 128 * 512)
    x = jax.ShapeDtypeStruct((1, 8, 128), jnp.float32)
    temp, arguments = {}, {}
    for kind in ("", "int8", "nf4"):
        stored = jax.eval_shape(
            lambda p, k=kind: quantise_backbone(p, k) if k else p, shapes
        )

        def loss(x, p):
            def blocks(module, x):
                rope = (jnp.ones((1, 8, 1, 64)), jnp.zeros((1, 8, 1, 64)))
                for block in module.layers:
                    x, _ = block(x, rope, CausalMask())
                return x

            return jnp.sum(Llama(CONFIG).apply({"params": p}, x, method=blocks) ** 2)

        compiled = jax.jit(jax.grad(loss)).lower(x, stored).compile()
        memory = compiled.memory_analysis()
        temp[kind] = memory.temp_size_in_bytes
        arguments[kind] = memory.argument_size_in_bytes
    rest = arguments[""] - kernels
    assert arguments["int8"] - rest == pytest.approx(kernels / 4, rel=0.03)
    assert arguments["nf4"] - rest == pytest.approx(kernels * 0.53125 / 4, rel=0.03)
    # Beyond what the float model needs, a few kernels of one layer, not those of three.
    largest = 4 * 128 * 512
    for kind in ("int8", "nf4"):
        assert temp[kind] - temp[""] < 4.5 * largest < 0.6 * kernels, temp
