"""Directories for tpu-inference and sglang-jax: their keys, and heads that these engines would misread."""

from dataclasses import replace

import numpy as np
import pytest
from engines import jax_engine
from our_heads import exported, write_base, write_heads
from refusals import refused
from safetensors.numpy import load_file
from tiny import random_params, tiny_arch

from medusa_jax.files.layouts.engines import why_not
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.heads.dflash import DFlashConfig, DSparkConfig
from medusa_jax.heads.eagle3 import Eagle3Config

TPU, SGLANG = "tpu_inference", "sglang_jax"
LLAMA = tiny_arch(n_layers=7, d_model=64, n_heads=2, n_kv_heads=1, head_dim=64)
QWEN = replace(LLAMA, qk_norm=True)
EAGLE3 = Eagle3Config(n_heads=3, rope_theta=500.0, d_ff=28)
DFLASH = DFlashConfig(n_heads=3, n_layers=2, tap_layers="1,3", rope_theta=1e6)
DSPARK = DSparkConfig(n_heads=3, tap_layers="1,3", markov_rank=6, confidence=True)


def written(tmp_path, heads, target, llama=LLAMA):
    base = write_base(tmp_path / "base", llama, random_params(llama, 0))
    stored = write_heads(tmp_path / "heads", base, heads)
    return stored, base, exported(stored, base, target, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize(
    ("target", "heads", "general"),
    [
        (TPU, EAGLE3, "eagle3"),
        (TPU, replace(EAGLE3, draft_vocab=11, norm_before_residual=True), "eagle3"),
        (SGLANG, replace(EAGLE3, draft_vocab=11), "eagle3"),
        (TPU, DFLASH, "dflash"),
        (SGLANG, replace(DFLASH, rope_theta=50.0), "dflash"),
        (SGLANG, DSPARK, "dflash"),
    ],
    ids=["tpu", "tpu narrow", "sglang", "tpu dflash", "sglang dflash", "sglang dspark"],
)
def test_keys_of_engines_in_jax(target, heads, general, tmp_path):
    """Nothing but what they read, the same tensors as in the general layout; and we read it back."""
    stored, base, out = written(tmp_path, heads, target)
    state = jax_engine(out, heads.drafter)
    usual = exported(stored, base, general, tmp_path / "usual", dtype="bfloat16")
    usual = load_file(usual / "model.safetensors")
    offsets = state.pop("d2t", None)
    for key, x in state.items():
        np.testing.assert_array_equal(x, usual[key])
    if offsets is not None:
        np.testing.assert_array_equal(offsets, usual.get("d2t", np.zeros(len(offsets))))
    again = open_heads(str(out)).fitted(base)
    assert again.read(LLAMA).keys() == stored.read(LLAMA).keys()
    said = (out / "README.md").read_text()
    assert ("--speculative-num-draft-tokens 4" in said) == (target == SGLANG)
    assert ('"num_speculative_tokens": 3' in said) == (target == TPU)


TPU_ALONE = [
    (DFLASH, {"rope_theta": 10000.0}, {}, "rotates DFlash by 10^6, whatever a file says, not by 10000"),
    (DFLASH, {"head_dim": 32}, {}, "with padding, of head_dim 32"),
    (DFLASH, {"tap_layers": "0,3"}, {}, "does not tap stream 0"),
    (DFLASH, {"markov_rank": 4, "root_guesses": True}, {}, "has no Markov head"),
    (EAGLE3, {"head_dim": 32}, {}, "pads heads as the model's 64, not 32"),
    (EAGLE3, {}, {"qk_norm": True}, "inner streams of LlamaForCausalLM only, not of Qwen3"),
]  # fmt: skip
SGLANG_ALONE = [
    (EAGLE3, {"norm_before_residual": True}, {}, "ignores norm_before_residual"),
    (DFLASH, {"tap_layers": "1,7"}, {}, "does not tap stream 7"),
    (DFLASH, {"rope_theta": 0.0}, {"rope_scaling": "linear", "rope_factor": 2.0}, "ignores the scaling"),
    (DSPARK, {"root_guesses": False}, {}, "lets the root's slot of DSpark guess"),
]  # fmt: skip
BOTH = [
    (EAGLE3, {"fc_norm": True}, {}, "has no norms before fc"),
    (EAGLE3, {"norm_output": True}, {}, "ignores norm_output"),
    (EAGLE3, {"n_layers": 2}, {}, "runs one layer, not 2"),
    (EAGLE3, {"tap_layers": "1,3,5"}, {}, r"reads the layers (2, 3, 4), whatever a file says, not (1, 3, 5)"),
    (EAGLE3, {}, {"n_layers": 6}, "of which a model of 6 has fewer"),
    (EAGLE3, {"rope_theta": 0.0}, {"rope_scaling": "linear", "rope_factor": 2.0}, "misreads the rotation's"),
    (EAGLE3, {"lm_head": "low_rank", "rank": 5}, {}, "low-rank LM heads"),
    (EAGLE3, {}, {"sliding_window": 8}, "inner streams of LlamaForCausalLM"),
    (DFLASH, {"window": 4, "sliding_layers": "0"}, {}, "ignores windows"),
    (DFLASH, {"causal": "all"}, {}, "lets a slot see all others"),
    (DFLASH, {"root_guesses": True}, {}, "drops the guess of the root's slot"),
    (DFLASH, {"lm_head": "own"}, {}, "scores by the model's LM head, not by 'own'"),
    (DFLASH, {"draft_vocab": 11}, {}, "scores all tokens, not the 11 of heads.draft_vocab"),
    (DFLASH, {"draft_vocab": 11, "lm_head": "own"}, {}, "scores all tokens, not the 11"),
    (DFLASH, {"tap_layers": "3,1"}, {}, "reads each layer once, in order"),
    (DFLASH, {}, {"qkv_bias": True}, "inner streams of LlamaForCausalLM and Qwen3ForCausalLM only"),
]  # fmt: skip
CASES = [(TPU, *case) for case in TPU_ALONE + BOTH]
CASES += [(SGLANG, *case) for case in SGLANG_ALONE + BOTH]


@pytest.mark.parametrize(("target", "heads", "fields", "shape", "reason"), CASES)
def test_heads_that_they_would_misread(target, heads, fields, shape, reason):
    """Each is refused for what the engine would do; without the fault nothing is."""
    assert not why_not(heads, target, LLAMA)
    name = target.replace("_", "-")
    said = why_not(replace(heads, **fields), target, replace(LLAMA, **shape))
    assert reason in said and (name in said or "EAGLE-3 files" in said)


def test_models_of_the_same_shape(tmp_path):
    """A Mistral without windows has a Llama's shape; the engines look at its name. Nothing is written."""
    stored, base, _ = written(tmp_path, EAGLE3, TPU)
    file = tmp_path / "base/config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "MistralForCausalLM"))
    with refused("not of MistralForCausalLM"):
        exported(stored, base, SGLANG, tmp_path / "mistral")
    assert not (tmp_path / "mistral").exists()
