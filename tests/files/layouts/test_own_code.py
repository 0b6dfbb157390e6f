"""Directories that `convert` writes, loaded and run by the engines' own code (`own_code.py`).

`TPU_INFERENCE_PYTHON` and `SGLANG_JAX_PYTHON` name the Python of an environment with the engine, `SGLANG_JAX` the folder
of sglang-jax's package; `.ci/run` makes them.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from numpy_layers import numpy_norm
from our_heads import exported, logits_of, write_base, write_heads
from tiny import random_params, tiny_arch

from medusa_jax.files.layouts.engines import why_not
from medusa_jax.files.layouts.heads_io import load_heads
from medusa_jax.heads.dflash import DFlashConfig
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.registry import make_drafter
from medusa_jax.sharding import make_mesh

pytestmark = pytest.mark.usefixtures("x64")
SUPPORT = Path(__file__).parents[2] / "support"
T = 6
LLAMA = tiny_arch(n_layers=7, d_model=64, n_heads=2, n_kv_heads=1, head_dim=64)
QWEN = tiny_arch(n_layers=4, d_model=64, n_heads=2, n_kv_heads=1, head_dim=64, qk_norm=True)
BLOCKS = DFlashConfig(n_heads=3, n_layers=2, tap_layers="1,3", mask_token=5, rope_theta=1e6)
EAGLE3 = Eagle3Config(n_heads=2, draft_vocab=11, rope_theta=500.0, d_ff=28)
CASES = [(LLAMA, EAGLE3), (LLAMA, Eagle3Config(n_heads=2)), (QWEN, BLOCKS)]


def own_code(engine, kind, directory, folder, **given):
    """What the engine computes with a directory; skipped without its environment."""
    python = os.environ.get(f"{engine.upper()}_PYTHON")
    if not python:
        pytest.skip(f"no environment of {engine}")
    np.savez(folder / "in.npz", **given)
    arguments = [engine, kind, directory, folder / "in.npz", folder / "out.npz"]
    done = subprocess.run(
        [python, SUPPORT / "own_code.py", *map(str, arguments)],
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.environ.get("SGLANG_JAX", "")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return np.load(folder / "out.npz")


@pytest.fixture
def compared(tmp_path):
    """A function: [(fused, logits) as the engine has them, the same by us] for heads in a layout."""

    def run(engine, llama, heads, target, step=1):
        params = random_params(llama, 0)
        base = write_base(tmp_path / "base", llama, params, "bfloat16")
        stored = write_heads(tmp_path / "heads", base, heads, dtype="bfloat16", norms=1.0)
        out = exported(stored, base, target, tmp_path / "out")
        heads, mine, _ = load_heads(str(out), llama, make_mesh(), dtype="float64")
        drafter, rng = make_drafter(heads, llama), np.random.default_rng(1)
        D, layers = llama.d_model, mine["heads_0"]
        streams = rng.standard_normal((T, len(drafter.taps) * D))
        streams, at = np.float64(jnp.asarray(streams, jnp.bfloat16)), step * np.arange(T)
        tokens = rng.integers(0, llama.vocab_size, T + 1)
        there = own_code(
            engine, heads.drafter, out, tmp_path, streams=streams, tokens=tokens,
            positions=np.append(at, at[-1] + 1), embedding=params["embed_tokens"]["embedding"],
            lm_head=params["lm_head"]["kernel"].T,
        )  # fmt: skip
        fused, logits = streams @ np.asarray(layers["fc"]["kernel"]), there["logits"]
        if heads.drafter == "dflash":
            scale = layers["hidden_norm"]["scale"]
            fused = numpy_norm(np.asarray(scale), fused, llama.rms_eps)
            logits = logits[1:]
        else:
            tokens = np.append(tokens, there["ids"][logits[T - 1].argmax()])
        hidden = np.pad(streams, ((0, len(tokens) - T), (D, 0)))[None]
        want = logits_of(drafter, mine, params, hidden, tokens[None], step)[:, 0]
        if heads.drafter == "dflash":
            want = want[:, T - 1]
        else:
            want = np.append(want[0, :T], want[1, T - 1 : T], 0)
        return there["fused"], logits, fused, want

    return run


def near(found, wanted):
    """Equal within bfloat16's rounding, which a layer adds up."""
    return np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


@pytest.mark.parametrize("engine", ["tpu_inference", "sglang_jax"])
@pytest.mark.parametrize(("llama", "heads"), CASES, ids=["narrow", "all tokens", "dflash"])
def test_own_code_guesses_what_we_do(engine, llama, heads, compared):
    fused, logits, our_fused, our_logits = compared(engine, llama, heads, engine)
    assert near(fused, our_fused)
    assert near(logits, our_logits)


WRONG = [
    ("tpu_inference", QWEN, replace(BLOCKS, rope_theta=50.0)),
    ("sglang_jax", LLAMA, replace(EAGLE3, norm_before_residual=True)),
    ("sglang_jax", LLAMA, replace(EAGLE3, fc_norm=True)),
]


@pytest.mark.parametrize(("engine", "llama", "heads"), WRONG)
def test_own_code_misreads_what_we_refuse(engine, llama, heads, compared):
    """It loads other engines' directory of these heads without a word, and guesses something else."""
    assert why_not(heads, engine, llama)
    general = "eagle3" if heads.drafter == "eagle3" else "dflash"
    _, logits, _, our_logits = compared(engine, llama, heads, general)
    assert not near(logits, our_logits)


def test_slow_planes_of_tpu_inference(compared):
    """Its DFlash has Llama 3.1's scaling, which shows over long distances only. `convert` says so until this fails."""
    target = "tpu_inference"
    _, logits, _, our_logits = compared(target, QWEN, BLOCKS, target, step=1000)
    assert not near(logits, our_logits)
