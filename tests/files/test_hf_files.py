"""Model directories: configurations, strictness, what is written, the hub."""

import dataclasses
import json
import re
import shutil
import struct
import sys
from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import run
from head_files import WIDER as TINY
from refusals import refused
from safetensors.numpy import load_file, save_file

from medusa_jax.config import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files import hf, hf_writer, tensors
from medusa_jax.files.families import ACTIVATIONS, FAMILIES, FIELDS
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hf_config import LAYER_KINDS, parse_config, read_config
from medusa_jax.files.hf_writer import config_to_hf, save_backbone
from medusa_jax.files.tensor import read_whole
from medusa_jax.files.torch_writer import save_torch
from medusa_jax.model.llama import init_params
from medusa_jax.model.rope import rope_frequencies, rope_tables
from medusa_jax.sharding import make_mesh

SIZES = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
SIZES |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
LLAMA2 = SIZES | {"model_type": "llama", "max_position_embeddings": 4096}
LLAMA2 |= {"rms_norm_eps": 1e-05, "rope_scaling": None, "hidden_act": "silu"}
LLAMA2 |= {"torch_dtype": "float16"}
LLAMA31_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
LLAMA31_ROPE |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}


def read(tmp_path, **changes):
    raw = {k: v for k, v in (LLAMA2 | changes).items() if v != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config(str(tmp_path))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_backbone(str(path), TINY, init_params(TINY, jax.random.key(0)), dtype="float32")
    return path


@pytest.fixture
def copy(model_dir, tmp_path):
    """A copy of the model, and its weights as a dictionary to spoil."""
    path = tmp_path / "copy"
    shutil.copytree(model_dir, path)
    return path, load_file(path / "model.safetensors")


def load(path, dtype="float32"):
    return hf.load_backbone(str(path), make_mesh(), dtype)


def fails(path, match):
    with refused(match):
        load(path)


def assert_same(found, expected):
    """Two models: configurations and parameters."""
    assert found[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 16}
LLAMA31 = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
LLAMA31 |= {"max_position_embeddings": 131072}
IN_5 = {"rope_scaling": "absent", "rope_parameters": LLAMA31_ROPE | {"rope_theta": 5e5}}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 28}
QWEN3 = {"model_type": "qwen3", "hidden_size": 2048, "num_attention_heads": 32}
PHI3 = {"model_type": "phi3"}
GRANITE4 = {"model_type": "granitemoehybrid", "layer_types": ["full_attention"] * 32}
GRANITE4 |= {"num_local_experts": 0, "position_embedding_type": "rope"}
DIVISORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 7e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 9e3},
}
BY_KIND = {"rope_parameters": BY_KIND, "rope_scaling": {"rope_type": "linear", "factor": 8}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GROWING = YARN | {"llama_4_scaling_beta": 0.1}
WINDOW = ("sliding_window", "window_layers")
LATE = (False,) * 28 + (True,) * 4
ROPE = ("rope_scaling", "rope_factor", "rope_theta", "rope_original_max_position")


@pytest.mark.parametrize(
    ("changes", "names", "values"),
    [
        ({}, vars(LlamaConfig()), vars(LlamaConfig()).values()),  # Llama-2-7B's
        (LLAMA31 | {"rope_theta": 5e5, "rope_scaling": LLAMA31_ROPE}, ROPE, ("llama3", 8, 5e5, 8192)),
        (LLAMA31 | IN_5, ROPE, ("llama3", 8, 5e5, 8192)),
        # Vicuna 16k, with the oldest spelling.
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ROPE[:3], ("linear", 4.0, 1e4)),
        *((BY_KIND | {"model_type": name}, (*ROPE[:3], "rope_window_theta"), ("linear", 8, 7e5, 9e3))
          for name in ("gemma3_text", "olmo3")),
        ({"model_type": "mistral", "sliding_window": 4096}, WINDOW, (4096, ())),
        ({"model_type": "mistral", "sliding_window": None}, WINDOW, (0, ())),
        # Ministral 8B's files: transformers reads them as another family, and ignores the field for Phi 3.
        (MIXED | {"model_type": "mistral"}, WINDOW, (4096, (True, False) * 16)),
        (MIXED | PHI3 | {"sliding_window": 8}, WINDOW, (8, ())),
        (QWEN2 | {"use_sliding_window": False, "sliding_window": 9}, WINDOW, (0, ())),
        (QWEN2 | {"sliding_window": 8}, WINDOW, (8, LATE)),
        (QWEN2 | {"sliding_window": 8, "max_window_layers": 32}, WINDOW, (0, ())),
        (QWEN2 | MIXED, WINDOW, (4096, (True, False) * 16)),
        (QWEN2, ("qkv_bias", "out_bias"), (True, False)),
        (QWEN3, ("qk_norm", "head_dim", "qkv_bias"), (True, 128, False)),
        ({"head_dim": None, "per_layer_config": {}, "configuration_files": ["config.json"]}, ("head_dim",), (128,)),
        # The context of Phi 3's class comes before the one in the table.
        *((PHI3 | {"rope_scaling": DIVISORS | {"type": kind, "original_max_position_embeddings": 2048, "factor": 3.0}},
           (ROPE[0], ROPE[3]), ("longrope", 4096)) for kind in ("longrope", "su", "yarn")),
        # 44 * (30 / 44) is below 30.
        (PHI3 | {"head_dim": 44, "partial_rotary_factor": 30 / 44}, ("rope_dim",), (30,)),
        ({"model_type": "internlm3", "attention_bias": True}, ("qkv_bias", "out_bias"), (True, False)),
        ({"model_type": "internlm3", "qkv_bias": True}, ("qkv_bias", "out_bias"), (True, False)),
        ({"model_type": "gemma3", "text_config": {"num_attention_heads": 16}},
         ("vocab_size", "d_model", "d_ff", "n_layers", "n_heads", "tie_embeddings"), (262208, 2304, 9216, 26, 16, True)),
        ({"model_type": "ministral3", "rope_scaling": GROWING, "max_position_embeddings": 131072}, ("max_position",), (32768,)),
        ({"attention_bias": True, "mlp_bias": True}, ("qkv_bias", "out_bias", "mlp_bias"), (True,) * 3),
    ],
)  # fmt: skip
def test_configs(changes, names, values, tmp_path):
    """Of files, and of those that we write."""
    config = read(tmp_path, **changes)
    for one in (config, parse_config("config.json", config_to_hf(config))):
        assert [getattr(one, name) for name in names] == [*values]


SCALED = {"factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False}
SCALED |= {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2}


@pytest.mark.parametrize(
    ("rope", "theta", "context", "factor", "frequencies"),
    [
        (YARN, 1e6, 131072, 1.138629436111989,
         [1.0, 0.177828, 0.0316228, 0.00421756, 0.0005, 4.4457e-05, 7.90569e-06, 1.40585e-06]),
        (YARN | SCALED, 1e4, 40960, 0.9167912505456107,
         [1.0, 0.316228, 0.1, 0.0316228, 0.00622189, 0.000435576, 0.000125, 3.95285e-05]),
        (YARN | {"factor": None}, 1e6, 40960, 1.0223143551314209, None),
        (YARN | {"attention_factor": 1.5, "beta_fast": None}, 1e6, 131072, 1.5, None),
        ({"type": "dynamic", "factor": 2.0}, 1e4, 40960, 1.0, [10 ** (-i / 2) for i in range(8)]),
    ],
)  # fmt: skip
def test_yarn_and_dynamic(rope, theta, context, factor, frequencies, tmp_path):
    """Frequencies and factors are those of transformers 5.24. YaRN's context is what it reaches."""
    said = {"head_dim": 16, "rope_theta": theta, "max_position_embeddings": 40960}
    config = read(tmp_path, rope_scaling=rope, **said)
    assert config.max_position == context
    assert config.rope_attention_factor == pytest.approx(factor)
    if frequencies:
        np.testing.assert_allclose(rope_frequencies(config), frequencies, rtol=1e-5)
    cos, _ = rope_tables(config, jnp.zeros((1, 1), jnp.int32), "float32")
    np.testing.assert_allclose(cos, factor, rtol=1e-6)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    assert read_config(str(tmp_path)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is one of llama, .*, not 'gpt2'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"model_type": "gemma3", "quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, "one of llama, .*, not 'mistral4'"),
        ({"model_type": "ministral3"}, "rope_type 'default' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        *(({"model_type": name, field: "gelu"}, rf"{field} 'gelu' is not supported \(only 'silu', 'swish', 'gelu_p")
          for name, field in (("gemma3_text", "hidden_activation"), ("exaone", "activation_function"))),
        ({"model_type": "gemma", "hidden_act": "silu"}, r"hidden_act 'silu' is not supported \(only 'gelu_p"),
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"per_layer_config": {"0": {"hidden_act": "relu2"}}}, "per_layer_config {.* is not supported"),
        ({"configuration_files": ["config.json", "config.4.0.0.json"]}, r"configuration_files \['config.* is not"),
        ({"transformers_weights": "b.safetensors"}, "transformers_weights 'b.safe"),
        ({"hidden_size": "absent"}, "does not say hidden_size"),
        ({"hidden_size": "4"}, "hidden_size should be int, not '4'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, "rope type is one of .* not 'ntk'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "short_factor"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"model_type": "smollm3", "no_rope_layers": [2]}, "no_rope_layers"),
        *((GRANITE4 | {field: value}, what) for value in ("absent", None) for field, what in
          (("layer_types", "not 'linear"), ("num_local_experts", "experts 8"), ("position_embedding_type", "'none'"))),
        *((MIXED | {"model_type": name}, "one of full_attention, not 'sliding") for name in ("smollm3", "llama")),
        (PHI3 | {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        (PHI3 | {"partial_rotary_factor": 1e308}, "partial_rotary_factor 1e.308 is not"),
        (PHI3 | {"partial_rotary_factor": 1e-3}, "partial_rotary_factor 0.001 is not"),
        (PHI3 | {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 1},
         "original_max_position_embeddings should be a number above 1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "differ by layer"),
        *(({"model_type": name, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
           "rope_parameters should be tables of full_attention and sliding_attention, not")
          for name in ("gemma3_text", "olmo3")),
        *(({"model_type": name, "rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling should be a table with rope_type")
          for name in ("gemma3_text", "olmo3")),
        *(({"model_type": name, "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {spelling: "linear"}}},
           "sliding_attention's rope_type 'linear' is not supported")
          for name in ("gemma3_text", "olmo3") for spelling in ("type", "rope_type")),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 5}, "do not fit together"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 32}, "layer_types is one of .*chunked"),
        *((QWEN2 | {"layer_types": ["full_attention"], "use_sliding_window": on}, "layer_types should be a list of 32 kinds")
          for on in (True, False)),
        *((QWEN2 | MIXED | off, "full_attention for every layer without a window")
          for off in ({"use_sliding_window": False}, {"sliding_window": None})),
    ],
)  # fmt: skip
def test_unsupported_configs(tmp_path, changes, message):
    with refused(message):
        read(tmp_path, **changes)


def test_fields_with_two_names():
    """transformers reads the same of them."""
    transformers = pytest.importorskip("transformers")
    fields = {"activation_function": "relu2", "num_layers": 1, "hidden_act": "silu"}
    for kind, act in (("gemma3_text", "hidden_activation"), ("exaone", "hidden_act")):
        theirs = transformers.AutoConfig.for_model(kind, **SIZES | fields)
        ours = parse_config("config.json", fields | SIZES | {"model_type": kind})
        assert ours.activation == ACTIVATIONS[getattr(theirs, act)]
        assert ours.n_layers == theirs.num_hidden_layers


@pytest.mark.parametrize("kind", sorted({*FAMILIES} - {"minicpm", "ministral3"}))
def test_fields_that_a_file_may_leave_out(kind):
    """transformers has the same values for them."""
    transformers = pytest.importorskip("transformers")
    few = {"vocab_size": 96, "hidden_size": 2560, "intermediate_size": 64}
    few |= {"num_hidden_layers": 8, "num_attention_heads": 160}
    if kind == GRANITE4["model_type"]:
        few |= GRANITE4 | {"layer_types": ["full_attention"] * 8}
    theirs = transformers.AutoConfig.for_model(**few | {"model_type": kind})
    ours = parse_config("config.json", few | {"model_type": kind})
    rope = theirs.rope_parameters
    rope = rope.get("full_attention", rope)
    theirs.head_dim = getattr(theirs, "head_dim", None) or 16
    names = {ours: name for name, ours in FAMILIES[kind].names.items()}
    for name, field in FIELDS.items():
        assert getattr(ours, field) == getattr(theirs, names.get(name, name)), name
    act = getattr(theirs, "hidden_activation", None) or theirs.hidden_act
    assert ours.activation == ACTIVATIONS[act]
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.rope_scaling.replace("none", "default") == rope["rope_type"]
    layers = [LAYER_KINDS[ours.has_window(i)] for i in range(8)]
    assert layers == (getattr(theirs, "layer_types", None) or layers)


SLIDING = {"sliding_attention": {"rope_theta": 77.0}}


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize("rope", [None, {}, SLIDING, SLIDING | {"full_attention": None}])
def test_bases_of_kinds_of_layers(kind, rope):
    """transformers has the same."""
    transformers = pytest.importorskip("transformers")
    fields = {"rope_theta": 33.0, "rope_local_base_freq": 20.0, "rope_parameters": rope}
    ours = parse_config("config.json", fields | SIZES | {"model_type": kind})
    theirs = transformers.AutoConfig.for_model(kind, **deepcopy(fields), **SIZES)
    bases = [theirs.rope_parameters[layers]["rope_theta"] for layers in LAYER_KINDS]
    assert [ours.rope_theta, ours.rope_window_theta] == bases


def test_unreadable_directories(tmp_path, model_dir):
    fails(tmp_path / "nowhere", "is not a directory, hub id")
    fails(model_dir / "config.json", "is a file; give the directory")
    fails(tmp_path, r"config\.json cannot be read: No such file")
    (tmp_path / "heads.json").write_text("{}")
    fails(tmp_path, "holds draft heads, not a model: give it to --drafter")
    (tmp_path / "config.json").write_text('{"workdir": "run"}')
    fails(tmp_path, "is a training's work directory: use its export/")
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    fails(tmp_path, "is an adapter .* save the model that PEFT merges it into")
    (tmp_path / "adapter_config.json").unlink()
    shutil.copy(model_dir / "config.json", tmp_path)
    fails(tmp_path, "holds no weights: looked for model.safetensors")
    lfs = "version https://git-lfs.github.com/spec/v1\n"
    (tmp_path / "model.safetensors").write_text(lfs)
    fails(tmp_path, "git-lfs pointer")


@pytest.mark.parametrize(
    ("rename", "prefix"),
    [
        (lambda name: f"module.{name}", "module."),
        (lambda name: name.replace("s.0.", "s.0._orig_mod."), "_orig_mod."),
        (lambda name: name.replace("model.", "language_model.model."), "language_model."),
    ],
)
def test_keys_of_a_wrapped_model(copy, rename, prefix):
    path, state = copy
    save_file({rename(name): x for name, x in state.items()}, path / "model.safetensors")
    fails(path, f"keys have the prefix '{prefix}.*which is not the model's")


def test_keys_without_the_models_prefix(copy):
    path, state = copy
    model, file = load(path), path / "model.safetensors"
    flat = {name.removeprefix("model."): x for name, x in state.items()}
    save_file(flat, file)
    assert_same(load(path), model)
    assert BaseFiles.open(str(path)).fingerprint() == fingerprint(*model)
    save_file(flat | {"model.norm.weight": state["model.norm.weight"]}, file)
    fails(path, r"key 'norm\.weight' is also there as 'model\.norm\.weight'")


def test_the_names_of_a_family(copy):
    """Of fields and of keys, as its authors' files have them."""
    path, state = copy
    model, family = load(path), FAMILIES["exaone"]
    for theirs, ours in reversed(family.keys.items()):
        pattern = rf"(^|\.){re.escape(ours)}\."
        state = {re.sub(pattern, rf"\1{theirs}.", name): x for name, x in state.items()}
    assert "transformer.h.0.attn.attention.out_proj.weight" in state
    save_file(state, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text()) | {"model_type": "exaone"}
    usual = {ours: theirs for theirs, ours in family.names.items()}
    renamed = {usual.get(name, name): value for name, value in raw.items()}
    (path / "config.json").write_text(json.dumps(renamed))
    assert_same(load(path), model)


def test_a_tied_model_with_another_lm_head_is_not_tied(copy, capsys):
    """As in transformers 5; the same model, to heads and exports, as the one whose config.json says so."""
    path, _ = copy
    model = load(path)
    assert not model[0].tie_embeddings
    file = path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    assert_same(load(path), model)
    [said] = capsys.readouterr().err.splitlines()
    assert "the LM head differs from the embedding: not tied" in said
    (path / "pytorch_model.bin").touch()
    assert hf.model_shape(str(path)) == model[0]
    said = capsys.readouterr().err
    assert said.count("reading model.safetensors, not pytorch_model.bin") == 1
    (path / "pytorch_model.bin").unlink()
    assert BaseFiles.open(str(path)).fingerprint() == fingerprint(*model)
    (path / "model.safetensors").unlink()
    assert hf.model_shape(str(path)).tie_embeddings  # all that is known


@pytest.mark.parametrize(
    ("value", "dtype"), [(np.nan, "float32"), (np.inf, "bfloat16"), (-np.inf, "float16")]
)
def test_values_that_are_no_numbers(value, dtype, copy):
    path, state = copy
    name = "model.layers.1.mlp.up_proj.weight"
    state[name][3, 5] = value
    spoilt = {key: x.astype(jnp.dtype(dtype)) for key, x in state.items()}
    save_file(spoilt, path / "model.safetensors")
    message = f"is damaged: tensor '{name}' contains NaN or infinity"
    fails(path, rf"model\.safetensors {message}")
    (path / "model.safetensors").unlink()
    save_torch(str(path / "pytorch_model.bin"), spoilt)
    fails(path, rf"pytorch_model\.bin {message}")


@pytest.mark.parametrize("kind", ["F32", "F8_E4M3"])
def test_tensors_that_cannot_be_read(tmp_path, kind):
    header = b'{"x": {"dtype": "%s", "shape": [0], "data_offsets": [0, 0]}}' % kind.encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with refused(f"{file}: 'x' cannot be read"):
        read_whole(tensors.open_safetensors(str(file))["x"])


def test_values_that_the_type_cannot_hold(copy):
    path, state = copy
    state["model.norm.weight"][0] = 1e5
    save_file(state, path / "model.safetensors")
    load(path, jnp.bfloat16)
    with refused(r"'model\.norm\.weight' in .* float16 cannot hold"):
        load(path, jnp.float16)


def test_broken_index(copy):
    path, state = copy
    (path / "model.safetensors").rename(path / "one.safetensors")
    name = next(iter(state))
    save_file({name: state[name]}, path / "two.safetensors")
    index = path / "model.safetensors.index.json"
    good = dict.fromkeys(state, "one.safetensors")
    index.write_text(json.dumps({"weight_map": good}))
    assert load(path)[0] == TINY
    for weight_map, message in (
        (good | {name: "no.safetensors"}, "the shard 'no.safetensors', which is not"),
        (good | {name: "../one.safetensors"}, r"the shard '\.\./one\.safetensors'"),
        (good | {"more": "one.safetensors"}, "key 'more' is missing from the shards of"),
        ({}, "has no weight_map"),
        (good | {name: "two.safetensors"}, f"key '{name}' is both in"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        fails(path, message)


def test_a_single_file_is_read_before_an_older_index(copy, capsys):
    """transformers' order: `save_pretrained` over a sharded directory leaves the index, with or without its shards."""
    path, state = copy
    name = "model.norm.weight"
    save_file(state | {name: state[name] + 1}, path / "old.safetensors")
    index = {"weight_map": dict.fromkeys(state, "old.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for _ in range(2):
        _, params = load(path)
        np.testing.assert_array_equal(params["norm"]["scale"], state[name])
        line = "reading model.safetensors, not model.safetensors.index.json"
        assert line in capsys.readouterr().err
        (path / "old.safetensors").unlink(missing_ok=True)


def test_an_adapter_in_a_models_directory_is_refused(copy):
    """transformers applies it, so the files alone are another model."""
    path, _ = copy
    (path / "adapter_config.json").write_text("{}")
    fails(path, "has an adapter .* save the model that PEFT merges it into")


def test_storage_types_and_fingerprint(model_dir, tmp_path):
    """bfloat16 on disk: float32 and bfloat16 loads are the same model; a changed weight is not."""
    config, params = load(model_dir)
    save_backbone(str(tmp_path), config, params)
    config, wide = load(tmp_path)
    _, narrow = load(tmp_path, jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype("bfloat16")}
    mark = fingerprint(config, params)
    assert len(mark) == 16 and int(mark, 16)
    assert fingerprint(config, wide) == mark == fingerprint(config, narrow)
    assert fingerprint(config, jax.tree.map(np.asarray, wide)) == mark
    other = init_params(TINY, jax.random.key(1))
    assert fingerprint(config, other) != mark


def test_what_a_training_has_ruined_is_named(tmp_path):
    params = init_params(TINY, jax.random.key(0))
    params["norm"]["scale"] *= jnp.nan
    with refused("the trained model .* 'model.norm.weight' contains NaN"):
        save_backbone(str(tmp_path), TINY, params)


def test_impossible_combination_cannot_be_saved(tmp_path):
    odd = {"sliding_window": 4, "mlp_bias": True, "qkv_bias": True, "qk_norm": True}
    with refused("no Hugging Face model class"):
        save_backbone(str(tmp_path), dataclasses.replace(TINY, **odd), {})


def test_hub_offline(tmp_path):
    code = "from medusa_jax.files import hub\nhub.resolve('some-owner/some-model')"
    done = run(sys.executable, "-c", code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    said = "UserError: some-owner/some-model is no local directory, and the hub"
    assert said in done.stderr.splitlines()[-1]


def weights_in(path):
    return {name: read_whole(t) for name, t in tensors.open_checkpoint(path).items()}


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    """One file, then shards, other shards, one file again: each time the directory is the model's
    last state, nothing of the one before is left, and both forms hold the same tensors."""
    path = str(tmp_path)
    params = [init_params(TINY, jax.random.key(i)) for i in range(3)]
    save_backbone(path, TINY, params[0], "float32")
    in_one = weights_in(path)
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", 4000)
    save_backbone(path, TINY, params[0], "float32")
    index = json.loads((tmp_path / hf_writer.INDEX_FILE).read_text())
    first = set(index["weight_map"].values())
    assert len(first) > 2 and all((tmp_path / f).stat().st_size < 40_000 for f in first)
    assert f"model-00001-of-{len(first):05d}.safetensors" in first
    jax.tree.map(np.testing.assert_array_equal, weights_in(path), in_one)
    save_backbone(path, TINY, params[1], "float32")
    assert not first & {file.name for file in tmp_path.iterdir()}
    assert_same(load(path), (TINY, params[1]))
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", 10**9)
    save_backbone(path, TINY, params[2], "float32")
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    assert_same(load(path), (TINY, params[2]))


def test_a_write_that_fails_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    """The disk is full at the second shard of the second model."""
    path = str(tmp_path)
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", 4000)
    save_backbone(path, TINY, init_params(TINY, jax.random.key(0)), "float32")
    before = weights_in(path)
    save, written = hf_writer.save_safetensors, []

    def full(file, *rest):
        if written:
            raise UserError(f"{file} could not be written: disk full")
        written.append(file)
        save(file, *rest)

    monkeypatch.setattr(hf_writer, "save_safetensors", full)
    with refused("disk full"):
        save_backbone(path, TINY, init_params(TINY, jax.random.key(1)), "float32")
    jax.tree.map(np.testing.assert_array_equal, weights_in(path), before)
