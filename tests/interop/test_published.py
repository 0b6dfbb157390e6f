"""Published heads: found, recognised by their keys, read right or refused with a one-line error."""

import re

import huggingface_hub
import jax
import numpy as np
import pytest
from closeness import assert_close
from head_files import (
    EAGLE,
    EAGLE3,
    IDS,
    LLAMA,
    SPECULATORS,
    VERSIONS,
    D,
    V,
    eagle3_logits,
    eagle3_state,
    eagle3_version,
    eagle_logits,
    eagle_state,
    hydra_logits,
    hydra_state,
    medusa_logits,
    medusa_state,
    normal,
    renamed,
    write,
)
from our_heads import (
    BASE,
    EMBEDDED,
    FOLLOWING,
    HIDDEN,
    STREAMS,
    TOKENS,
    T,
    load,
    our_logits,
)
from safetensors.numpy import load_file, save_file

from medusa_jax.errors import UserError
from medusa_jax.formats.torch_writer import save_torch
from medusa_jax.interop import hf, own_heads
from medusa_jax.interop.fingerprint import fingerprint
from medusa_jax.interop.heads_io import open_heads
from medusa_jax.interop.hf_writer import save_backbone
from medusa_jax.sharding import make_mesh

pytestmark = pytest.mark.usefixtures("x64")
# As published: the configuration says two heads, whatever the file holds.
V13 = {"base_model_name_or_path": "base", "medusa_num_heads": 2, "medusa_num_layers": 1}
HYDRA = {"hydra_num_heads": 3, "hydra_num_layers": 3, "grounded_heads": True}
HYDRA |= {"hidden_state_offset": 0}


def fails(match, path, **options):
    with pytest.raises(UserError, match=match) as info:
        load(path, **options)
    assert "\n" not in str(info.value)


# The four layouts of Medusa.


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_heads_only(name, n_layers, tmp_path, capfd):
    """v1.3: the configuration says 2 heads, the file holds 5."""
    state = medusa_state(5, n_layers)
    config = V13 | {"medusa_num_layers": n_layers}
    folder = write(tmp_path, state, name, config)
    for path in (folder, folder / name):
        heads, params, meta = load(path)
        assert (heads.drafter, heads.n_heads, heads.n_layers) == ("medusa", 5, n_layers)
        assert heads.lm_head == "own" and meta["medusa_num_heads"] == 2
        assert_close(our_logits(heads, params), medusa_logits(state, HIDDEN[-1]))
    assert "holds 5 heads, its config.json says 2" in capfd.readouterr().err
    few, params, _ = load(folder, n_heads=2)
    assert few.n_heads == 2 and set(params) == {"heads_0", "heads_1"}


def test_version_2_shares_the_lm_head(tmp_path):
    state = medusa_state(3, shared=True)
    config = V13 | {"medusa_num_heads": 3, "version": "2"}
    heads, params, _ = load(write(tmp_path, state, "medusa_lm_head.safetensors", config))
    assert heads.lm_head == "shared" and heads.n_heads == 3
    lm_head = BASE["lm_head"]["kernel"].T
    assert_close(our_logits(heads, params), medusa_logits(state, HIDDEN[-1], lm_head))


def test_full_model(tmp_path):
    """v1.0: backbone and heads in one directory, which is a model whose fingerprint the heads know."""
    save_backbone(str(tmp_path), LLAMA, jax.tree.map(np.float32, BASE), "float32")
    file, state = tmp_path / "model.safetensors", medusa_state(3, prefix="medusa_head.")
    save_file(load_file(file) | state, file)
    heads, params, _ = load(tmp_path)
    want = medusa_logits(state, HIDDEN[-1], prefix="medusa_head.")
    assert_close(our_logits(heads, params), want)
    mark = fingerprint(*hf.load_backbone(str(tmp_path), make_mesh()))
    assert load(tmp_path, fingerprint=mark)[0] == heads
    fails(f"trained on the model with fingerprint {mark}, this one has 01", tmp_path,
          fingerprint="01")  # fmt: skip


def test_adapter(tmp_path):
    """PEFT's directory: heads that it saves whole, its wrapper's names, LoRA weights of the backbone."""
    prefix = "base_model.model.medusa_head."
    state = medusa_state(2, prefix=prefix)
    folder = write(tmp_path, state, "adapter_model.bin")
    heads, params, _ = load(folder)
    assert_close(our_logits(heads, params), medusa_logits(state, HIDDEN[-1], prefix=prefix))
    inner = "modules_to_save.default."
    named = {re.sub(r"(head\.\d+\.)", rf"\g<1>{inner}", key): x for key, x in state.items()}
    named[f"{prefix}0.original_module.0.linear.weight"] = np.zeros((D, D), np.float32)
    again, same, _ = load(write(tmp_path, named, "adapter_model.bin"))
    assert again == heads
    jax.tree.map(np.testing.assert_array_equal, same, params)
    lora = {"base_model.model.model.norm.lora_A.weight": np.zeros((2, D), np.float32)}
    write(tmp_path, state | lora, "adapter_model.bin")
    fails("adapters in the same file change it", folder, fingerprint="01")
    assert load(folder, allow_other_base=True)[0] == heads


def test_layers_that_are_one_module(tmp_path):
    """Two layers that torch shares; a file made safe holds the first alone."""
    state = medusa_state(2, 2)
    for k in range(2):
        for leaf in ("weight", "bias"):
            state[f"{k}.1.linear.{leaf}"] = state[f"{k}.0.linear.{leaf}"]
    want = medusa_logits(state, HIDDEN[-1])
    less = {key: x for key, x in state.items() if ".1.linear." not in key}
    config = V13 | {"medusa_num_layers": 2}
    for content in (state, less):
        folder = write(tmp_path, content, "medusa_lm_head.safetensors", config)
        heads, params, _ = load(folder)
        assert heads.n_layers == 2
        assert_close(our_logits(heads, params), want)


def test_vllm(tmp_path):
    """Without biases; a draft vocabulary, most frequent token first, with a row of the LM heads for each of its
    tokens or for all. The rest is in test_export_heads.py."""
    state, names = medusa_state(3), {}
    for key, x in state.items():
        k, j, *rest = key.split(".")
        block = f"blocks.{k}.layers.{j}.{rest[-1]}"
        names[block if "linear" in rest else f"lm_heads.{k}.weight"] = x
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}
    without = {key: x for key, x in names.items() if "bias" not in key}
    zero = {k: x * (0 if "bias" in k else 1) for k, x in state.items()}
    heads, params, _ = load(write(tmp_path, without, "model.safetensors", config))
    assert_close(our_logits(heads, params), medusa_logits(zero, HIDDEN[-1]))
    ids, full = np.array([9, 2, 5, 7]), config | {"medusa_fc_bias": True}
    want = medusa_logits(state, HIDDEN[-1])[:, np.sort(ids)]
    whole = names | {"token_map": ids}
    cut = {key: x[ids] if "lm_head" in key else x for key, x in whole.items()}
    for content in (whole, cut):
        heads, params, _ = load(write(tmp_path, content, "model.safetensors", full))
        assert heads.draft_vocab == 4
        assert_close(our_logits(heads, params), want)
    twice = whole | {"token_map": np.array([1, 1])}
    fails("token_map", write(tmp_path, twice, "model.safetensors", full))


# Hydra.


@pytest.mark.parametrize("plus", [False, True])
def test_hydra(plus, tmp_path):
    """Tied layers, LM heads with biases, tables that nothing reads; untied ones too."""
    for tied in (True, False):
        state = hydra_state(plus=plus, tied=tied)
        folder = write(tmp_path, state, "hydra_lm_head.pt", HYDRA)
        heads, params, _ = load(folder)
        assert heads.drafter == ("hydrapp" if plus else "hydra")
        assert (heads.n_heads, heads.n_layers, heads.tie_layers) == (3, 3, tied)
        assert heads.lm_bias and ("layers_2" in params["heads_0"]) != tied
        want = hydra_logits(state, HIDDEN, EMBEDDED, plus=plus)
        assert_close(our_logits(heads, params), want, 512)


def test_hydra_without_the_copies_of_its_tied_layer(tmp_path):
    state = hydra_state(plus=True)
    less = {key: x for key, x in state.items() if ".5.linear." not in key}
    folder = write(tmp_path, state, "hydra_lm_head.pt", HYDRA)
    _, want, _ = load(folder)
    heads, params, _ = load(write(tmp_path, less, "hydra_lm_head.safetensors", HYDRA))
    assert heads.tie_layers and heads.n_layers == 3
    jax.tree.map(np.testing.assert_array_equal, params, want)


# EAGLE-1.


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle(name, bias, tmp_path):
    """One layer for all depths; the copy of the embedding and the rotary table are left."""
    state = eagle_state(bias)
    folder = write(tmp_path, state, name, EAGLE | {"bias": bias})
    heads, params, _ = load(folder, n_heads=4)
    assert (heads.drafter, heads.n_layers, heads.lm_head) == ("eagle", 1, "shared")
    assert heads.fc_bias == bias and list(params) == ["heads_0"]
    lm_head = BASE["lm_head"]["kernel"].T
    want = eagle_logits(state, HIDDEN, FOLLOWING, lm_head)
    assert_close(our_logits(heads, params), want, 512)


# EAGLE-3.


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize(("narrow", "flags"), VERSIONS)
def test_eagle3(name, narrow, flags, tmp_path):
    """A layer with separate sizes and rotation, over some tokens or all; then as speculators writes it,
    its tapped layers in the configuration."""
    state, fields = eagle3_version(narrow, flags)
    copied = {"embed_tokens.weight": normal(np.random.default_rng(0), V, D)}
    depth = len(TOKENS) - T
    want = eagle3_logits(state, STREAMS, FOLLOWING, EAGLE3 | flags, depth)
    for config, tensors, taps in (
        (EAGLE3, state, ""),
        (SPECULATORS, renamed(state), "0,0,1"),
    ):
        heads, params, _ = load(write(tmp_path, tensors | copied, name, config | fields))
        assert (heads.drafter, heads.n_layers, heads.lm_head) == ("eagle3", 1, "own")
        assert (heads.tap_layers, heads.draft_vocab) == (taps, len(IDS) if narrow else 0)
        if narrow:
            np.testing.assert_array_equal(params["draft_vocab"]["ids"], IDS)
        assert_close(our_logits(heads, params)[:depth], want, 512)


def test_speculators_without_a_rotation_has_the_default_one(tmp_path):
    layers = dict(SPECULATORS["transformer_layer_config"])
    del layers["rope_parameters"]
    config = SPECULATORS | {"transformer_layer_config": layers}
    folder = write(tmp_path, renamed(eagle3_state()), "model.safetensors", config)
    assert load(folder)[0].rope_theta == 10000.0


def test_the_number_of_layers_is_told_by_those_that_are_read(tmp_path):
    """Of a backbone of 32: entered or left. The model here has one."""
    for ids in ([2, 16, 29], [1, 15, 28]):
        table = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        folder = write(
            tmp_path, eagle3_state(), "model.safetensors", EAGLE3 | {"eagle_config": table}
        )
        fails("were made with n_layers 32, the model has 1", folder)


# What trainers add to config.json that changes nothing, and how else they name and store tensors.
NEUTRAL = {
    "quantization_config": None,
    "mask_token_id": None,
    "eagle_aux_hidden_state_layer_ids": [],
    "parallel_draft_step": 1,
    "torchscript": False,
    "id2label": {"0": "LABEL_0"},
    "some_new_list": [],
}
OPTIMIZER = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "mask_token_id": None,
    "norm_before_residual": None,
}


def by_frequency(state):
    """Model-Optimizer's d2t: the most frequent token first; no t2d."""
    order = np.random.default_rng(1).permutation(len(IDS))
    del state["t2d"]
    state["lm_head.weight"] = np.ascontiguousarray(state["lm_head.weight"][order])
    state["d2t"] = IDS[order] - np.arange(len(IDS))
    return renamed(state)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lambda s: s, {"num_hidden_layers": 40}),
        (lambda s: s, {"draft_vocab_size": None}),
        (lambda s: s | {"d2t": np.int32(s["d2t"])}, {}),
        (lambda s: {k: x for k, x in s.items() if k != "t2d"}, {"draft_vocab_size": None}),
        (lambda s: {f"model.{k}": x for k, x in s.items()}, {}),
        (lambda s: {f"_orig_mod.{k}": x for k, x in s.items()}, {}),
        (lambda s: {f"module.model.{k}": x for k, x in renamed(s).items()}, {}),
        (lambda s: {k if k in ("d2t", "t2d", "lm_head.weight") else f"model.{k}": x
                    for k, x in s.items()}, {}),
        (by_frequency, NEUTRAL),
        (by_frequency, {"eagle_config": OPTIMIZER}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_eagle3_of_other_trainers(change, fields, name, tmp_path):
    """Keys decide, and what says nothing is no reason to refuse: the same drafts."""
    state = eagle3_state()
    depth = len(TOKENS) - T
    want = eagle3_logits(state, STREAMS, FOLLOWING, EAGLE3, depth)
    heads, params, _ = load(write(tmp_path, change(dict(state)), name, EAGLE3 | fields))
    np.testing.assert_array_equal(params["draft_vocab"]["ids"], IDS)
    assert_close(our_logits(heads, params)[:depth], want, 512)


# Refusals, one row for each mechanism. Keys and shapes that all layouts check are in test_heads_io.py.

TAPPED = "eagle_aux_hidden_state_layer_ids"
FILES = {
    "medusa": (medusa_state(3), "medusa_lm_head.pt", V13),
    "hydra": (hydra_state(), "hydra_lm_head.pt", HYDRA),
    "eagle": (eagle_state(), "pytorch_model.bin", EAGLE),
    "eagle3": (eagle3_state(), "model.safetensors", EAGLE3),
    "speculators": (renamed(eagle3_state()), "model.safetensors", SPECULATORS),
}


@pytest.mark.parametrize(
    ("kind", "match", "fields", "tensors"),
    [
        ("medusa", "holds 1 layers, its .* says 2", {"medusa_num_layers": 2}, {}),
        ("medusa", r"key '1\.1\.weight' of .* is missing", {}, {"1.1.weight": None}),
        ("hydra", "hidden_state_offset 1 are not supported", {"hidden_state_offset": 1}, {}),
        ("hydra", "holds 3 layers per head, its .* says 4", {"hydra_num_layers": 4}, {}),
        ("eagle", "rope_theta 5000.0, the model has 10000.0", {"rope_theta": 5000}, {}),
        ("eagle3", "not known to have: 'mrope_section'", {"mrope_section": [1]}, {}),
        ("eagle3", "not known to have: 'x'", {"eagle_config": {"x": 1}}, {}),
        ("eagle3", "parallel_draft_step 2 is not supported", {"parallel_draft_step": 2}, {}),
        ("eagle3", "draft_vocab_size 12, .* has 11 tokens", {"draft_vocab_size": 12}, {}),
        ("eagle3", "fc_norm should be true or false, not 1", {"fc_norm": 1}, {}),
        ("eagle3", r"\[3, 9, 20\] are not the layers of", {TAPPED: [3, 9, 20]}, {}),
        ("eagle3", "layers of qwen3 are not supported", {"model_type": "qwen3"}, {}),
        ("eagle3", "'d2t' is missing", {}, {"d2t": None}),
        ("eagle3", "name different tokens", {}, {"t2d": ~eagle3_state()["t2d"]}),
        ("eagle3", "some twice", {}, {"t2d": None, "d2t": -np.arange(len(IDS))}),
        ("speculators", "does not say norm_before_residual", {"norm_before_residual": ...}, {}),
        ("speculators", "only eagle3 is supported for these weights, not .x", {"speculators_model_type": "x"}, {}),
        ("speculators", "not known to write: 'mask_token_id'", {"mask_token_id": 1}, {}),
        ("speculators", "embed_requires_grad True is not supported", {"embed_requires_grad": True}, {}),
        ("speculators", "numbers from 0 to 1", {TAPPED: [0, 1, 9]}, {}),
    ],
)  # fmt: skip
def test_files_that_are_not_supported(kind, match, fields, tensors, tmp_path):
    state, name, config = FILES[kind]
    config = {k: x for k, x in (config | fields).items() if x is not ...}
    state = {k: x for k, x in (state | tensors).items() if x is not None}
    fails(match, write(tmp_path, state, name, config))


# Where heads are looked for.


def test_safetensors_are_preferred(tmp_path):
    write(tmp_path, medusa_state(2), "medusa_lm_head.safetensors", V13)
    save_torch(str(tmp_path / "medusa_lm_head.pt"), medusa_state(3))
    assert open_heads(str(tmp_path)).heads.n_heads == 2
    assert open_heads(str(tmp_path / "medusa_lm_head.pt")).heads.n_heads == 3


def test_from_the_hub_only_what_is_needed(tmp_path, monkeypatch):
    """The safetensors alone where there are any, else the .pt, else a whole model."""
    asked = []

    def snapshot(repo, revision, allow_patterns, ignore_patterns):
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    write(tmp_path, medusa_state(2), "medusa_lm_head.safetensors", V13)
    assert open_heads("owner/heads").heads.n_heads == 2
    assert len(asked) == 2 and not any(".pt" in p for patterns in asked for p in patterns)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    write(tmp_path, medusa_state(3), "medusa_lm_head.pt", V13)
    assert open_heads("owner/heads").heads.n_heads == 3
    assert "medusa_lm_head.pt" in asked[-1] and "*.safetensors" not in asked[-1]


def test_other_things_are_no_heads(tmp_path):
    model = tmp_path / "model"
    write(model, {"model.norm.weight": normal(np.random.default_rng(0), D)},
          "model.safetensors", {"model_type": "llama"})  # fmt: skip
    fails("holds a model, not draft heads: give it to --model", model)
    (model / "heads").mkdir()
    (model / "heads" / "heads.json").write_text("{}")
    fails(f"a model with its heads: give --drafter {model}/heads", model)
    (tmp_path / "empty").mkdir()
    fails("holds no draft heads: --drafter takes heads that train.py", tmp_path / "empty")


def test_our_own_by_directory_and_by_file(tmp_path):
    path = tmp_path / "medusa_lm_head"
    state = medusa_state(2)
    write(path, state, "medusa_lm_head.pt", V13)
    heads, params, _ = load(path)
    base = {"d_model": D, "vocab_size": V, "fingerprint": "x"}
    own_heads.save_heads(str(tmp_path / "own"), heads, params, base=base, recipe={})
    for file in ("", "heads.json", "heads.safetensors"):
        again, loaded, _ = load(tmp_path / "own" / file)
        assert again == heads
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
