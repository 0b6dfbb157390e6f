"""DFlash and DSpark in the files of z-lab, SpecForge, DeepSpec and speculators: written, read, refused."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from engines import config_of
from head_files import LLAMA, normal, write
from our_heads import BASE, exported, write_heads
from refusals import refused
from safetensors.numpy import load_file

from medusa_jax import load
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.heads.dflash import DFlashConfig, DSparkConfig

D, V, H = LLAMA.d_model, LLAMA.vocab_size, LLAMA.head_dim
DSPARK = DSparkConfig(
    n_heads=4, mask_token=3, tap_layers="0,1", markov_rank=6, kv_heads=1, confidence=True
)
NARROW = DSparkConfig(
    n_heads=4, tap_layers="1", markov_rank=6, draft_vocab=7, lm_head="own"
)
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
# As speculators c05b95b writes the same heads, over some tokens.
IDS = [0, 2, 3, 5, 8, 9, V - 1]
SPECULATORS = MARKOV | {
    "architectures": ["DSparkSpeculator"], "auto_map": {"": "config.DSparkSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [0, 1], "block_size": 4, "draft_vocab_size": len(IDS),
    "dtype": "float32", "mask_token_id": 3, "sample_from_anchor": True,
    "sliding_window_non_causal": False, "speculators_model_type": "dspark",
    "speculators_version": "0.7.0", "target_hidden_size": None, "tie_word_embeddings": False,
    "speculators_config": {
        "algorithm": "dspark", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "owner/base"},
    },
    "transformer_layer_config": {k: x for k, x in LAYER.items() if k != "num_target_layers"},
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("config", "confidence"),
    [
        (SPECFORGE, True),
        (DEEPSPEC, True),
        (DEEPSPEC | {"confidence_head_with_markov": False}, False),
    ],
    ids=["specforge", "deepspec", "another confidence"],
)
def test_files_of_others(config, confidence, tmp_path):
    """Fields in a table or not; neither a copy of the embedding is read, nor a confidence that does not see the
    token before."""
    there = state()
    sure = there["confidence_head.proj.weight"]
    copy = {"embed_tokens.weight": normal(np.random, V, D)}
    copy |= {} if confidence else {"confidence_head.proj.weight": sure[:, :D]}
    stored = open_heads(str(write(tmp_path, there | copy, "model.safetensors", config)))
    assert stored.heads == DSparkConfig(
        n_heads=4, mask_token=3, tap_layers="0,1", markov_rank=6, attention_heads=2, kv_heads=1,
        head_dim=H, d_ff=12, rope_theta=50.0, rms_eps=1e-5, confidence=confidence,
    )  # fmt: skip
    arrays, markov = stored.read(LLAMA), "markov_head.markov_"
    assert len(arrays) == len(there) - (0 if confidence else 2)
    for name, expected in {
        "markov_w1/embedding": there[f"{markov}w1.weight"],
        "markov_w2/kernel": there[f"{markov}w2.weight"].T,
        "layers_1/self_attn/q_proj/kernel": there["layers.1.self_attn.q_proj.weight"].T,
    }.items():
        np.testing.assert_array_equal(arrays[f"heads_0/{name}"], expected)
    if confidence:
        np.testing.assert_array_equal(arrays["heads_0/confidence/kernel"], sure.T)


def speculators_state(order=None):
    """Tensors of DSpark heads over the tokens `IDS`, listed in any order."""
    rng, there = np.random.default_rng(1), state()
    ids = np.array(IDS)[range(len(IDS)) if order is None else order]
    rows = {"lm_head.weight": normal(rng, V, D), "embed_tokens.weight": normal(rng, V, D)}
    rows["lm_head.weight"] = rows["lm_head.weight"][ids]
    rows["markov_head.markov_w2.weight"] = there["markov_head.markov_w2.weight"][ids]
    member = np.isin(np.arange(V), ids)
    return there | rows | {"d2t": ids - np.arange(len(ids)), "t2d": member}


def test_files_of_speculators(tmp_path):
    """Layers by their inputs; the draft vocabulary in any order; an LM head of their own."""
    there = speculators_state()
    stored = open_heads(str(write(tmp_path / "a", there, "model.safetensors", SPECULATORS)))
    heads = stored.heads
    assert (heads.n_heads, heads.tap_layers, heads.root_guesses) == (4, "0,1", True)
    assert (heads.draft_vocab, heads.lm_head, heads.confidence) == (len(IDS), "own", True)
    np.testing.assert_array_equal(stored.ids, IDS)
    mixed = speculators_state(order=[3, 0, 6, 1, 2, 5, 4])
    again = open_heads(str(write(tmp_path / "b", mixed, "model.safetensors", SPECULATORS)))
    jax.tree.map(np.testing.assert_array_equal, again.read(LLAMA), stored.read(LLAMA))
    # A mask in the root's slot: one guess fewer.
    config = SPECULATORS | {"sample_from_anchor": False}
    fewer = open_heads(str(write(tmp_path / "c", there, "model.safetensors", config))).heads
    assert (fewer.n_heads, fewer.root_guesses) == (3, False)


@pytest.mark.parametrize(
    "heads", [DFLASH, DSPARK, NARROW], ids=["dflash", "dspark", "narrow"]
)
def test_written_for_speculators(heads, base, tmp_path):
    """The same tensors and copies of what speculators would compute with NaN."""
    stored = write_heads(tmp_path / "own", base, heads)
    out = exported(stored, base, "speculators", tmp_path / "out")
    raw, again = config_of(out), open_heads(str(out)).fitted(base)
    assert again.heads.lm_head == heads.lm_head  # the copy is no second matrix
    jax.tree.map(np.testing.assert_array_equal, again.read(LLAMA), stored.read(LLAMA))
    ids = np.arange(V) if stored.ids is None else stored.ids
    np.testing.assert_array_equal(np.arange(V) if again.ids is None else again.ids, ids)
    assert raw["draft_vocab_size"] == len(ids)
    known = SPECULATORS.keys() | {"torch_dtype"}
    assert known >= raw.keys() and raw["architectures"][0].endswith("Speculator")
    assert raw["sample_from_anchor"] == heads.root_guesses
    taps = [int(i) for i in heads.tap_layers.split(",")]
    assert raw["aux_hidden_state_layer_ids"] == taps
    embedding = load_file(out / "model.safetensors")["embed_tokens.weight"]
    np.testing.assert_array_equal(embedding, np.float32(BASE["embed_tokens"]["embedding"]))


# DFlash as DeepSpec trains it; DSpark with windows as SpecForge and speculators have them.
ROOT = replace(DFLASH, n_heads=4, root_guesses=True)
AT_SLOT = replace(DSPARK, sliding_layers="1", window=3)
AT_ROOT = replace(DSPARK, sliding_layers="0,1", window=2, window_at_root=True)
FREE = replace(AT_ROOT, causal="none")
# Fields that `Qwen3DSparkModel` of DeepSpec requires.
REQUIRED = {
    "target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank",
    "block_size",
}  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "targets"),
    [
        (DFLASH, ("dflash", "speculators")), (DSPARK, ("dflash", "speculators")),
        (ROOT, ("dflash", "speculators")), (AT_SLOT, ("dflash",)), (AT_ROOT, ("speculators",)),
        (FREE, ("speculators",)), (replace(ROOT, n_heads=1), ("dflash", "speculators")),
    ],
    ids=["dflash", "dspark", "deepspec", "slot", "root", "free", "one guess"],
)  # fmt: skip
def test_written_and_read_back(heads, targets, base, tmp_path):
    """The same tensors; every number that an engine reads; what cannot be said is refused."""
    stored = write_heads(tmp_path / "own", base, heads)
    names = ("drafter", "n_heads", "n_layers", "lm_head", "root_guesses", "markov_rank",
             "sliding_layers", "causal", "window", "window_at_root")  # fmt: skip
    for target in ("dflash", "speculators"):
        if target not in targets:
            with refused("window"):
                exported(stored, base, target, tmp_path / target)
            continue
        out = exported(stored, base, target, tmp_path / target)
        again, raw = open_heads(str(out)).fitted(base), config_of(out)
        jax.tree.map(np.testing.assert_array_equal, again.read(LLAMA), stored.read(LLAMA))
        for name in names:
            assert getattr(again.heads, name) == getattr(heads, name), name
        assert raw["block_size"] == heads.n_heads + (not heads.root_guesses)
    if "dflash" not in targets:
        return
    out = tmp_path / "dflash"
    raw, tensors = config_of(out), load_file(out / "model.safetensors")
    table, guesses = raw["dflash_config"], heads.root_guesses
    assert raw["architectures"] == ["Qwen3DSparkModel" if guesses else "DFlashDraftModel"]
    assert table["mask_token_id"] == (3 if heads.markov_rank else V - 1)
    assert table["target_layer_ids"] == ([-1, 0] if heads.markov_rank else [0])
    assert raw["num_target_layers"] == 1 and raw["num_hidden_layers"] == 2
    assert raw.get("markov_rank") == table.get("markov_rank")
    assert raw.get("markov_rank") == (heads.markov_rank if guesses else None)
    # DeepSpec draws what a file lacks at random, without a word.
    assert not guesses or raw.keys() >= REQUIRED
    copies = {"embed_tokens.weight", "lm_head.weight"}
    assert copies & tensors.keys() == (copies if guesses else set())


def deepspec_copies(base):
    """DeepSpec's frozen copies of the backbone's embedding and LM head, by its keys."""
    lm_head, embedding = base.lm_head().T, base.array("embed_tokens/embedding")
    return {"embed_tokens.weight": embedding, "lm_head.weight": lm_head}


def test_a_copy_of_the_lm_head_is_the_backbones(base, tmp_path):
    """Bit for bit it is no second matrix, another one is the heads' own."""
    copies = deepspec_copies(base)
    folder = write(tmp_path / "a", state() | copies, "model.safetensors", DEEPSPEC)
    stored = open_heads(str(folder))
    shared = stored.fitted(base)
    assert (stored.heads.lm_head, shared.heads.lm_head) == ("own", "shared")
    assert not any("lm_head" in path for path in shared.read(LLAMA))
    assert (stored.heads.rms_eps, shared.heads.rms_eps) == (1e-5, 0.0)  # the backbone's
    model = load(base.source, str(folder), tree="chain:4")
    assert model.drafter.heads == shared.heads
    assert exported(stored, base, "dflash", tmp_path / "out").is_dir()
    copies["lm_head.weight"] = copies["lm_head.weight"] + np.eye(V, D, dtype=np.float32)
    folder = write(tmp_path / "b", state() | copies, "model.safetensors", DEEPSPEC)
    other = open_heads(str(folder))
    assert other.fitted(base).heads.lm_head == "own"
    with refused("model's LM head, not by 'own'"):
        exported(other, base, "dflash", tmp_path / "no")


RANK_0 = {"markov_rank": 0, "enable_confidence_head": False, "markov_head_type": None}
ZLAB = LAYER | BLOCK | {"block_size": 4}


@pytest.mark.parametrize(
    ("config", "guesses"),
    [
        (DEEPSPEC | RANK_0 | {"architectures": ["Qwen3DSparkModel"]}, True),
        (DEEPSPEC | RANK_0, True),  # by num_anchors
        (ZLAB | {"architectures": ["DSparkDraftModel"]}, True),
        (SPECFORGE | {"dflash_config": PARTS | RANK_0}, True),  # by projector_type
        (SPECULATORS | RANK_0 | {"draft_vocab_size": V}, True),
        (SPECULATORS | RANK_0 | {"draft_vocab_size": V, "sample_from_anchor": False}, False),
        (ZLAB | {"architectures": ["DFlashDraftModel"]}, False),
        (ZLAB, False),
        (ZLAB | {"sample_from_anchor": True}, True),
        (ZLAB | {"dflash_config": {"attention_mode": "mha", "projector_type": "dflash"}}, False),
    ],
)  # fmt: skip
def test_whose_root_guesses(config, guesses, tmp_path):
    """Architecture and fields say it; none of these files has a Markov head."""
    folder = write(tmp_path, state(markov=False), "model.safetensors", config)
    heads = open_heads(str(folder)).heads
    assert (heads.root_guesses, heads.n_heads) == (guesses, 4 if guesses else 3)
    assert (heads.drafter, heads.markov_rank, heads.rms_eps) == ("dflash", 0, 1e-5)


SLIDING = {"sliding_window": 7, "use_sliding_window": True}
BOTH = SLIDING | {"layer_types": ["sliding_attention"] * 2}
SECOND = SLIDING | {"layer_types": ["full_attention", "sliding_attention"]}


def windowed(layers, **fields):
    """speculators' file with layers that have these fields."""
    return SPECULATORS | fields | {"transformer_layer_config": LAYER | layers}


@pytest.mark.parametrize(
    ("config", "sliding", "causal", "at_root"),
    [
        (windowed(BOTH), "0,1", "sliding", True),
        (windowed(SECOND), "1", "sliding", True),
        (windowed(BOTH, sliding_window_non_causal=True), "0,1", "none", True),
        (SPECFORGE | SECOND, "1", "sliding", False),
        (SPECFORGE | BOTH | {"is_causal": False}, "0,1", "none", False),
        (SPECFORGE | SECOND | {"is_causal": True}, "1", "all", False),
        (SPECFORGE | SLIDING | {"layer_types": None, "max_window_layers": 1}, "1", "sliding", False),
        (SPECFORGE | {"is_causal": False, "dflash_config": PARTS | {"causal": False}}, "", "none", False),
    ],
)  # fmt: skip
def test_windows(config, sliding, causal, at_root, tmp_path):
    """As speculators' `create_anchor_block_mask_mod`, SpecForge's layer types and vLLM's `is_causal` have them."""
    tensors = speculators_state() if "draft_vocab_size" in config else state()
    heads = open_heads(str(write(tmp_path, tensors, "model.safetensors", config))).heads
    assert (heads.sliding_layers, heads.causal) == (sliding, causal)
    assert (heads.window, heads.window_at_root) == (7 if sliding else 0, at_root)


@pytest.mark.parametrize(
    ("layers", "depth", "taps"), [(2, 36, "2,34"), (1, 36, "19"), (2, 28, "2,26")]
)
def test_tapped_layers_that_a_file_does_not_name(layers, depth, taps, tmp_path):
    """z-lab's `build_target_layer_ids`, one more here: [1, 33], [18], [1, 25]."""
    config = {k: x for k, x in ZLAB.items() if k != "target_layer_ids"}
    config |= {"num_target_layers": depth, "num_hidden_layers": layers}
    config["layer_types"] = ["full_attention"] * layers
    folder = write(tmp_path, state(markov=False), "model.safetensors", config)
    assert open_heads(str(folder)).heads.tap_layers == taps


def tabled(**change):
    return SPECFORGE | {"dflash_config": PARTS | change}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tabled(projector_type="domino"), "projector_type 'domino' is not supported"),
        (tabled(projector_type="dflash"), "projector_type contradicts the keys"),
        (tabled(target_layer_ids=[1, 0]), "ascending numbers"),
        (tabled(mask_token_id=None), "does not say mask_token_id"),
        (tabled(block_size=5), "block_size is 4, and 5 in dflash_config"),
        (SPECFORGE | {"layer_types": ["sliding_attention"] * 2}, "for every layer without a window"),
        (SPECFORGE | {"layer_types": ["chunked_attention"] * 2}, "a supported kind in layer_types .* not 'chunked"),
        (SPECFORGE | {"logit_scale": 0.5}, "logit_scale 0.5 is not supported"),
        (SPECFORGE | {"shift_label": True}, "shift_label True is not supported"),
        (SPECULATORS | {"norm_output": True}, "norm_output True is not supported"),
        (SPECULATORS | {"speculators_model_type": "eagle3"}, "dflash or dspark is supported"),
        (SPECULATORS | {"target_hidden_size": D + 1}, "target_hidden_size"),
        (SPECULATORS | {"markov_rank": 0}, "projector_type contradicts"),
        (SPECULATORS | {"draft_vocab_size": V}, "draft_vocab_size"),
    ],
)  # fmt: skip
def test_what_is_refused(config, message, tmp_path):
    tensors = state() if "dflash_config" in config else speculators_state()
    folder = write(tmp_path, tensors, "model.safetensors", config)
    with refused(message):
        open_heads(str(folder))
