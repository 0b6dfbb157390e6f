"""Directories that `convert` writes, loaded and run by the engines' own code (`own_code.py`).

`TPU_INFERENCE_PYTHON` and `SGLANG_JAX_PYTHON` name the Python of an environment with the engine, `SGLANG_JAX` the folder
of sglang-jax's package; `.ci/run` makes them.
"""

import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from our_heads import exported, logits_of, write_base, write_heads
from tiny import random_params, tiny_arch

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
def setup(tmp_path):
    """A function: an exported directory, our drafter and its parameters, and inputs of one text."""

    def make(llama, heads, target):
        params = random_params(llama, 0)
        base = write_base(tmp_path / "base", llama, params, "bfloat16")
        stored = write_heads(tmp_path / "heads", base, heads, dtype="bfloat16")
        out = exported(stored, base, target, tmp_path / "out")
        heads, mine, _ = load_heads(str(out), llama, make_mesh(), dtype="float64")
        drafter, rng = make_drafter(heads, llama), np.random.default_rng(1)
        streams = rng.standard_normal((T, len(drafter.taps) * llama.d_model))
        streams = np.float64(jnp.asarray(streams, jnp.bfloat16))
        given = {
            "streams": streams, "tokens": rng.integers(0, llama.vocab_size, T + 1),
            "positions": np.arange(T + 1), "embedding": params["embed_tokens"]["embedding"],
            "lm_head": params["lm_head"]["kernel"].T,
        }  # fmt: skip
        return out, drafter, mine, params, given

    return make


def ours(drafter, mine, params, given, tokens):
    """Logits [K, T + 2, O] after the rows of the text; those without streams mean nothing."""
    D, more = drafter.llama.d_model, len(tokens) - T
    hidden = np.pad(given["streams"], ((0, more), (D, 0)))
    return logits_of(drafter, mine, params, hidden[None], tokens[None])[:, 0]


def near(found, wanted):
    """Equal within bfloat16's rounding, which a layer adds up."""
    return np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


@pytest.mark.parametrize("engine", ["tpu_inference", "sglang_jax"])
@pytest.mark.parametrize(("llama", "heads"), CASES, ids=["narrow", "all tokens", "dflash"])
def test_own_code_guesses_what_we_do(engine, llama, heads, setup, tmp_path):
    out, drafter, mine, params, given = setup(llama, heads, engine)
    there = own_code(engine, heads.drafter, out, tmp_path, **given)
    layers = mine["heads_0"]
    fused = given["streams"] @ layers["fc"]["kernel"]
    if heads.drafter == "dflash":
        rms = np.sqrt((fused**2).mean(-1, keepdims=True) + llama.rms_eps)
        fused = fused / rms * layers["hidden_norm"]["scale"]
    assert near(there["fused"], fused)
    tokens, logits = given["tokens"], there["logits"]
    if heads.drafter == "eagle3":
        drafted = there["ids"][logits[T - 1].argmax()]
        want = ours(drafter, mine, params, given, np.append(tokens, drafted))
        want = np.append(want[0, :T], want[1, T - 1 : T], 0)
    else:
        want, logits = ours(drafter, mine, params, given, tokens)[:, T - 1], logits[1:]
    assert near(logits, want)
