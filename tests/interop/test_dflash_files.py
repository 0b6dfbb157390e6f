"""DFlash and DSpark in the files of z-lab, SpecForge and DeepSpec: written, read, refused."""

import json

import jax
import numpy as np
import pytest
from head_files import LLAMA, normal, write
from our_heads import BASE
from safetensors.numpy import load_file
from tiny import write_tokenizer

from medusa_jax.errors import UserError
from medusa_jax.formats.engines import why_not
from medusa_jax.formats.export import Export
from medusa_jax.formats.export_heads import convert
from medusa_jax.heads.dflash import DFlashConfig, DSparkConfig
from medusa_jax.interop import own_heads
from medusa_jax.interop.heads_io import open_heads
from medusa_jax.interop.hf import BaseFiles
from medusa_jax.interop.hf_writer import save_backbone
from medusa_jax.interop.stored_heads import abstract_heads

D, V, H = LLAMA.d_model, LLAMA.vocab_size, LLAMA.head_dim
DSPARK = DSparkConfig(n_heads=4, mask_token=3, tap_layers="0,1", markov_rank=6, kv_heads=1)
DFLASH = DFlashConfig(n_heads=3, n_layers=2, tap_layers="1", d_ff=20, rope_theta=50.0)
# config.json of SpecForge's DSpark, and of DeepSpec's, for the heads of `state`.
LAYER = {
    "model_type": "qwen3", "hidden_act": "silu", "hidden_size": D, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": H,
    "rms_norm_eps": 1e-5, "rope_theta": 50, "rope_scaling": None, "vocab_size": V,
    "max_position_embeddings": 64, "attention_bias": False, "attention_dropout": 0.0,
    "layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False,
    "tie_word_embeddings": False, "num_target_layers": 1,
}  # fmt: skip
MARKOV = {
    "markov_head_type": "vanilla", "markov_rank": 6, "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
BLOCK = {"mask_token_id": 3, "target_layer_ids": [-1, 0]}
PARTS = BLOCK | MARKOV | {"attention_mode": "gqa", "projector_type": "dspark"}
SPECFORGE = LAYER | {"block_size": 4, "dflash_config": PARTS}
DEEPSPEC = LAYER | MARKOV | BLOCK | {"block_size": 4, "num_anchors": 512}


def state(markov=True, seed=0):
    """The tensors of a file, by the keys of DeepSpec's module."""
    rng, shapes = np.random.default_rng(seed), {}
    for j in range(2):
        stem = f"layers.{j}."
        shapes |= {
            f"{stem}{n}.weight": (D,)
            for n in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{stem}self_attn.{n}_norm.weight": (H,) for n in "qk"}
        shapes |= {f"{stem}self_attn.{n}_proj.weight": (H, D) for n in "kv"}
        shapes |= {f"{stem}self_attn.q_proj.weight": (2 * H, D)}
        shapes |= {f"{stem}self_attn.o_proj.weight": (D, 2 * H)}
        shapes |= {f"{stem}mlp.{n}_proj.weight": (12, D) for n in ("gate", "up")}
        shapes |= {f"{stem}mlp.down_proj.weight": (D, 12)}
    shapes |= {"fc.weight": (D, 2 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    if markov:
        shapes |= {f"markov_head.markov_{n}.weight": (V, 6) for n in ("w1", "w2")}
        shapes |= {
            "confidence_head.proj.weight": (1, D + 6),
            "confidence_head.proj.bias": (1,),
        }
    return {key: normal(rng, *shape) for key, shape in shapes.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    write_tokenizer(path)
    save_backbone(str(path), LLAMA, jax.tree.map(np.float32, BASE), "float32")
    return BaseFiles.open(str(path))


@pytest.mark.parametrize("config", [SPECFORGE, DEEPSPEC], ids=["specforge", "deepspec"])
def test_files_of_others(config, tmp_path):
    """Fields in a table or not; a confidence and copies of the backbone are not read."""
    there = state()
    folder = write(tmp_path, there | {"embed_tokens.weight": normal(np.random, V, D)},
                   "model.safetensors", config)  # fmt: skip
    stored = open_heads(str(folder))
    wanted = DSparkConfig(
        n_heads=4, mask_token=3, tap_layers="0,1", markov_rank=6, attention_heads=2, kv_heads=1,
        head_dim=H, d_ff=12, rope_theta=50.0,
    )  # fmt: skip
    assert stored.heads == wanted
    arrays = stored.read(LLAMA)
    assert len(arrays) == len(there) - 2
    w2 = there["markov_head.markov_w2.weight"]
    np.testing.assert_array_equal(arrays["heads_0/markov_w2/kernel"], w2.T)
    w1 = there["markov_head.markov_w1.weight"]
    np.testing.assert_array_equal(arrays["heads_0/markov_w1/embedding"], w1)
    q = there["layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(arrays["heads_0/layers_1/self_attn/q_proj/kernel"], q.T)


@pytest.mark.parametrize("heads", [DFLASH, DSPARK], ids=lambda heads: heads.drafter)
def test_written_and_read_back(heads, base, tmp_path):
    """The same tensors; every number that an engine reads; a whole LM head is an own one."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: normal(rng, *x.shape), abstract_heads(heads, LLAMA))
    record = own_heads.base_record(LLAMA, base.fingerprint())
    own_heads.save_heads(str(tmp_path / "own"), heads, params, base=record, recipe={})
    stored = open_heads(str(tmp_path / "own"))
    out = tmp_path / "out"
    convert(Export(stored, base, "owner/base"), "dflash", str(out))
    again = open_heads(str(out))
    jax.tree.map(np.testing.assert_array_equal, again.read(LLAMA), stored.read(LLAMA))
    raw = json.loads((out / "config.json").read_text())
    assert raw["block_size"] == 4 and raw["num_target_layers"] == 1
    dspark = heads.drafter == "dspark"
    assert raw["architectures"] == ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"]
    table = raw["dflash_config"]
    assert table["mask_token_id"] == (3 if dspark else V - 1)
    assert table["target_layer_ids"] == ([-1, 0] if dspark else [0])
    assert raw.get("markov_rank") == table.get("markov_rank") == (6 if dspark else None)
    full = load_file(out / "model.safetensors") | {"lm_head.weight": normal(rng, V, D)}
    assert (
        open_heads(str(write(tmp_path, full, "model.safetensors", raw))).heads.lm_head
        == "own"
    )
    assert {k: v for k, v in vars(again.heads).items() if k in ("n_heads", "n_layers", "drafter")} == {
        "n_heads": heads.n_heads, "n_layers": 2, "drafter": heads.drafter}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projector_type": "domino"}, "projector_type 'domino' is not supported"),
        ({"markov_head_type": "rnn"}, "markov_head_type 'rnn' is not supported"),
        ({"projector_type": "dflash"}, "projector_type contradicts the keys"),
        ({"target_layer_ids": [1, 0]}, "ascending numbers"),
        ({"mask_token_id": None}, "does not say mask_token_id"),
        ({"block_size": 5}, "block_size is 4, and 5 in dflash_config"),
    ],
)
def test_tables_that_are_refused(change, message, tmp_path):
    config = SPECFORGE | {"dflash_config": PARTS | change}
    folder = write(tmp_path, state(), "model.safetensors", config)
    with pytest.raises(UserError, match=message):
        open_heads(str(folder))


def test_layers_that_are_refused(tmp_path):
    for change, message in (
        ({"layer_types": ["sliding_attention"] * 2}, "sliding attention"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
    ):
        folder = write(tmp_path, state(), "model.safetensors", SPECFORGE | change)
        with pytest.raises(UserError, match=message):
            open_heads(str(folder))


def test_heads_that_the_layout_cannot_hold():
    assert "draft_vocab 9" in why_not(DSparkConfig(draft_vocab=9), "dflash")
    assert "root_guesses True" in why_not(DFlashConfig(root_guesses=True), "dflash")
    assert not why_not(DSparkConfig(), "dflash") and not why_not(DFlashConfig(), "dflash")
