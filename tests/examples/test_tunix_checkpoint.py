"""A checkpoint by Tunix's names and shapes, as its table of torch's keys gives them, read back bit for bit."""

import re

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict
from refusals import refused
from safetensors.numpy import load_file
from tiny import write_model

from examples import tunix_checkpoint

# tunix/models/llama3/params.py of google/tunix 0737eb8: torch's key, the name, whether it is transposed.
TABLE = (
    (r"model\.embed_tokens\.weight", "embedder.input_embedding", False),
    (
        r"model\.layers\.(\d+)\.self_attn\.(\w+)_proj\.weight",
        r"layers.\1.attn.\2_proj.w",
        True,
    ),
    (r"model\.layers\.(\d+)\.mlp\.(\w+)\.weight", r"layers.\1.mlp.\2.kernel", True),
    (r"model\.layers\.(\d+)\.(\w+layernorm)\.weight", r"layers.\1.\2.w", False),
    (r"model\.norm\.weight", "final_norm.w", False),
    (r"lm_head\.weight", "lm_head.w", True),
)


def tunix_state(tensors, config):
    """What Tunix holds of a Hugging Face file; each array is the value of a variable."""
    state, H = {}, config.head_dim
    for key, x in tensors.items():
        [(pattern, name, turned)] = [row for row in TABLE if re.fullmatch(row[0], key)]
        x = x.T if turned else x
        if "attn" in name:
            x = (
                x.reshape(-1, H, x.shape[1])
                if "o_proj" in key
                else x.reshape(len(x), -1, H)
            )
        state[re.sub(pattern, name, key) + ".value"] = np.ascontiguousarray(x)
    return unflatten_dict(state, sep=".")


@pytest.mark.parametrize("extra", [False, True])
def test_the_weights_come_back(extra, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    config, _ = write_model(base, n_layers=2)
    tensors = load_file(base / "model.safetensors")
    state = tunix_state(tensors, config)
    if extra:
        state["layers"]["0"]["attn"]["q_proj"]["w_lora_a"] = {"value": np.zeros(2)}
    ocp.PyTreeCheckpointer().save(tmp_path / "step", state)
    given = [str(tmp_path / "step"), str(base), str(out)]
    if extra:
        with refused("w_lora_a is missing or not expected"):
            tunix_checkpoint.main(*given)
        return
    tunix_checkpoint.main(*given)
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys()
    for key, x in tensors.items():
        np.testing.assert_array_equal(found[key], x)
    assert (out / "tokenizer.json").read_text() == (base / "tokenizer.json").read_text()
