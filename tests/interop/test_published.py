"""Published heads: found, recognised by their keys, read right or refused with a one-line error."""

import json

import huggingface_hub
import jax
import ml_dtypes
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
    assert "holds 5 heads, its config.json says 2: 5 are read" in capfd.readouterr().err
    few, params, _ = load(folder, n_heads=2)
    assert few.n_heads == 2 and set(params) == {"heads_0", "heads_1"}


def test_version_2_shares_the_lm_head(tmp_path):
    state = medusa_state(3, shared=True)
    config = V13 | {"medusa_num_heads": 3, "version": "2"}
    heads, params, _ = load(write(tmp_path, state, "medusa_lm_head.safetensors", config))
    assert heads.lm_head == "shared" and heads.n_heads == 3
    lm_head = BASE["lm_head"]["kernel"].T
    assert_close(our_logits(heads, params), medusa_logits(state, HIDDEN[-1], lm_head))


@pytest.fixture
def full_model(tmp_path):
    """v1.0: backbone and heads in one directory; the state of the heads alone is returned too."""
    params = jax.tree.map(np.float32, BASE)
    save_backbone(str(tmp_path), LLAMA, params, "float32")
    state = medusa_state(3, prefix="medusa_head.")
    save_file(
        load_file(tmp_path / "model.safetensors") | state, tmp_path / "model.safetensors"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"medusa_num_heads": 3, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, state


def test_full_model(full_model):
    folder, state = full_model
    heads, params, _ = load(folder)
    want = medusa_logits(state, HIDDEN[-1], prefix="medusa_head.")
    assert_close(our_logits(heads, params), want)
    # The same directory is a model, and its heads know it.
    config, backbone = hf.load_backbone(str(folder), make_mesh())
    assert config.d_model == D
    mark = fingerprint(config, backbone)
    assert load(folder, fingerprint=mark)[0] == heads
    fails(f"trained on the model with fingerprint {mark}, this one has 01", folder,
          fingerprint="01")  # fmt: skip


ADAPTER = "base_model.model.medusa_head."


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_adapter(kind, tmp_path):
    """PEFT's directory: heads that it saves whole, alongside LoRA weights of the backbone."""
    state = medusa_state(2, prefix=ADAPTER)
    name = f"adapter_model.{kind}"
    folder = write(tmp_path, state, name)
    heads, params, _ = load(folder)
    want = medusa_logits(state, HIDDEN[-1], prefix=ADAPTER)
    assert_close(our_logits(heads, params), want)
    lora = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((2, D))
    }
    write(tmp_path, state | {k: np.float32(x) for k, x in lora.items()}, name)
    fails(
        "adapter_model.* holds heads and adapters of the backbone.*convert --to merged",
        folder,
    )
    assert load(folder, allow_other_base=True)[0] == heads


def test_adapter_with_the_wrappers_names(tmp_path):
    inner = {
        key.replace("medusa_head.0.", "medusa_head.0.modules_to_save.default."): x
        for key, x in medusa_state(1, prefix=ADAPTER).items()
    }
    other = {f"{ADAPTER}0.original_module.0.linear.weight": np.zeros((D, D), np.float32)}
    heads, params, _ = load(write(tmp_path, inner | other, "adapter_model.safetensors"))
    assert heads.n_heads == 1
    key = f"{ADAPTER}0.modules_to_save.default.0.linear.weight"
    np.testing.assert_array_equal(params["heads_0"]["layers_0"]["kernel"], inner[key].T)


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
    write(tmp_path, less, "medusa_lm_head.safetensors", V13)
    fails("holds 2 layers per head, its config.json says 1", tmp_path)


def vllm_state(state, one=False):
    names = {}
    for key, x in state.items():
        k, j, *rest = key.split(".")
        name = (
            f"blocks.{k}.layers.{j}.{rest[-1]}"
            if "linear" in rest
            else f"lm_heads.{k}.weight"
        )
        if not one or name in ("lm_heads.0.weight",) or "blocks" in name:
            names[name] = x
    return names


def test_vllm(tmp_path):
    state = medusa_state(3)
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}
    full = config | {"medusa_fc_bias": True}
    heads, params, _ = load(write(tmp_path, vllm_state(state), "model.safetensors", full))
    assert_close(our_logits(heads, params), medusa_logits(state, HIDDEN[-1]))

    without = {key: x for key, x in vllm_state(state).items() if "bias" not in key}
    zero = {k: x * (0 if "bias" in k else 1) for k, x in state.items()}
    heads, params, _ = load(write(tmp_path, without, "model.safetensors", config))
    assert_close(our_logits(heads, params), medusa_logits(zero, HIDDEN[-1]))

    one = {
        k: state["0.1.weight"] if k.endswith(".1.weight") else x for k, x in state.items()
    }
    shared = full | {"original_lm_head": True}
    write(tmp_path, vllm_state(one, True), "model.safetensors", shared)
    heads, params, _ = load(tmp_path)
    assert_close(our_logits(heads, params), medusa_logits(one, HIDDEN[-1]))

    # A draft vocabulary, most frequent token first: with a row of the LM heads for each of its tokens, or for all.
    ids = np.array([9, 2, 5, 7])
    want = medusa_logits(state, HIDDEN[-1])[:, np.sort(ids)]
    whole = vllm_state(state) | {"token_map": ids}
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


def test_tapped_layers_that_may_be_counted_from_their_end(tmp_path, capsys):
    """Of 32 layers as SpecForge numbers them; read as vLLM does, with a note."""
    for ids, noted in (([1, 15, 28], True), ([2, 16, 29], False)):
        config = SPECULATORS | {"eagle_aux_hidden_state_layer_ids": ids}
        folder = write(tmp_path, renamed(eagle3_state()), "model.safetensors", config)
        assert open_heads(str(folder)).heads.tap_layers == ",".join(map(str, ids))
        assert ("paper's would be [2, 16, 29]" in capsys.readouterr().err) == noted


# Refusals, one row for each mechanism. Keys and shapes that all layouts check are in test_heads_io.py.

TAPPED = "eagle_aux_hidden_state_layer_ids"
PARTS, LAYER = (SPECULATORS[n] for n in ("speculators_config", "transformer_layer_config"))
FILES = {
    "medusa": (medusa_state(3), "medusa_lm_head.pt", V13),
    "hydra": (hydra_state(), "hydra_lm_head.pt", HYDRA),
    "eagle": (eagle_state(), "pytorch_model.bin", EAGLE),
    "eagle3": (eagle3_state(), "model.safetensors", EAGLE3),
    "speculators": (renamed(eagle3_state()), "model.safetensors", SPECULATORS),
}


@pytest.mark.parametrize(
    ("kind", "match", "changes"),
    [
        ("medusa", "holds 1 layers per head, its .* says 2", {"medusa_num_layers": 2}),
        ("hydra", "hidden_state_offset 1 are not supported", {"hidden_state_offset": 1}),
        ("hydra", "holds 3 layers per head, its .* says 4", {"hydra_num_layers": 4}),
        ("eagle", r"holds the layers \[0\], its .* says 2", {"num_hidden_layers": 2}),
        ("eagle", "rope_theta 5000.0, the model has 10000.0", {"rope_theta": 5000}),
        ("eagle3", "not known to have: 'mrope_section'", {"mrope_section": [1]}),
        ("eagle3", "parallel_draft_step 2 is not supported", {"parallel_draft_step": 2}),
        ("eagle3", "use_last_layernorm False is not",
         {"eagle_config": {"use_last_layernorm": False}}),
        ("eagle3", "draft_vocab_size 12, .* has 11 tokens", {"draft_vocab_size": 12}),
        ("eagle3", "fc_norm should be true or false, not 1", {"fc_norm": 1}),
        ("eagle3", r"\[3, 9, 20\] are not the layers of", {"eagle_config": {TAPPED: [3, 9, 20]}}),
        ("eagle3", "ids .* are not the layers of", {"eagle_config": {TAPPED: [1, "x"]}}),
        ("eagle3", "unknown field 'x' under eagle_config", {"eagle_config": {"x": 1}}),
        ("eagle3", "rms_eps 1e-06, the model has 1e-05", {"rms_norm_eps": 1e-6}),
        ("eagle3", "layers of qwen3 are not supported", {"model_type": "qwen3"}),
        ("eagle3", r"'midlayer.mlp.down_proj.weight' .* \[16, 28\]", {"intermediate_size": 20}),
        ("speculators", "does not say norm_before_residual", {"norm_before_residual": ...}),
        ("speculators", "only eagle3 is supported, not 'df", {"speculators_model_type": "df"}),
        ("speculators", "with algorithm None", {"speculators_config": None}),
        ("speculators", "layer_config should be an object", {"transformer_layer_config": 1}),
        ("speculators", "not known to write: 'mask_token_id'", {"mask_token_id": 1}),
        ("speculators", "unknown field 'verify' under spec",
         {"speculators_config": PARTS | {"verify": 1}}),
        ("speculators", "belongs above it: 'fc_norm'",
         {"transformer_layer_config": LAYER | {"fc_norm": True}}),
        ("speculators", "with a trained embedding", {"embed_requires_grad": True}),
        ("speculators", r"should be a list of layers, not \[1.5\]", {TAPPED: [1.5]}),
        ("speculators", "numbers from 0 to 1", {TAPPED: [0, 1, 9]}),
    ],
)  # fmt: skip
def test_configurations_that_are_not_supported(kind, match, changes, tmp_path):
    state, name, config = FILES[kind]
    config = {k: x for k, x in (config | changes).items() if x is not ...}
    fails(match, write(tmp_path, state, name, config))


@pytest.mark.parametrize(
    ("kind", "match", "changes"),
    [
        ("medusa", r"key '1\.1\.weight' of shape \[23, 16\] is missing", {"1.1.weight": None}),
        ("hydra", r"'hydra_mlp\.1\.0.*missing", {"hydra_mlp.1.0.linear.weight": None}),
        ("eagle", "no place for: 'layers.0.input_lay",
         {"layers.0.input_layernorm.weight": np.zeros(D, np.float32)}),
        ("eagle3", "no place for: 'fc.bias'", {"fc.bias": np.zeros(D)}),
        ("eagle3", "'d2t' is missing", {"d2t": None}),
        ("eagle3", "name different tokens", {"t2d": ~eagle3_state()["t2d"]}),
        ("eagle3", "key 'd2t' in .* is float32", {"d2t": np.float32(IDS)}),
        ("eagle3", "names tokens twice", {"t2d": None, "d2t": -np.arange(len(IDS))}),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(kind, match, changes, tmp_path):
    state, name, config = FILES[kind]
    state = {k: x for k, x in (state | changes).items() if x is not None}
    fails(match, write(tmp_path, state, name, config))


def test_a_gap_between_the_numbers_of_heads(tmp_path):
    state = {k: x for k, x in medusa_state(3).items() if not k.startswith("1.")}
    fails(
        r"key '1\.0\.linear\.\w+' of .* is missing from .*medusa_lm_head\.pt",
        write(tmp_path, state, "medusa_lm_head.pt", V13),
    )


def test_mixed_types_are_read(tmp_path):
    state = medusa_state(3)
    mixed = state | {
        "0.0.linear.weight": state["0.0.linear.weight"].astype(ml_dtypes.bfloat16),
        "1.1.weight": state["1.1.weight"].astype(np.float16),
    }
    heads, params, _ = load(write(tmp_path, mixed, "medusa_lm_head.pt", V13))
    assert_close(our_logits(heads, params), medusa_logits(mixed, HIDDEN[-1]))


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
    def no_heads(path, match):
        with pytest.raises(UserError, match=match) as info:
            open_heads(str(path))
        assert "\n" not in str(info.value)

    model = tmp_path / "model"
    write(model, {"model.norm.weight": normal(np.random.default_rng(0), D)},
          "model.safetensors", {"model_type": "llama"})  # fmt: skip
    no_heads(model, "holds a model, not draft heads: give it to --model")
    (model / "heads").mkdir()
    (model / "heads" / "heads.json").write_text("{}")
    no_heads(model, f"a model with its heads: give --drafter {model}/heads")
    (tmp_path / "empty").mkdir()
    no_heads(
        tmp_path / "empty", "holds no draft heads: --drafter takes heads that train.py"
    )
    no_heads(tmp_path / "absent" / "x" / "y", "is not a directory, hub id")
    (tmp_path / "x.pt").write_bytes(b"no zip")
    no_heads(tmp_path / "x.pt", "not in torch's zip format")


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
