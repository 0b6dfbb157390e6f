"""What other engines do with a directory of heads, re-implemented from their sources in NumPy.

Strict where they are lax: a key that is unknown, missing or misshaped is an error here, since
there it means random weights without a word. Nothing of the package is used but the reader of torch's files.
"""

import json
import zipfile

import numpy as np
from head_files import (
    D,
    V,
    eagle3_logits,
    eagle3_state,
    eagle_logits,
    eagle_state,
    hydra_logits,
    hydra_state,
    medusa_logits,
    medusa_state,
    renamed,
    vllm_names,
)
from safetensors.numpy import load_file

from medusa_jax.files.tensor import read_whole
from medusa_jax.files.torch_files import open_torch


class WouldFailSilently(AssertionError):
    """A file that the engine takes and then guesses at random with, or does not take."""


def config_of(path):
    return json.loads((path / "config.json").read_text())


def strict(state, like):
    """The tensors, if their keys and shapes are exactly those of `like`, whose rotary tables engines do not keep."""
    wanted = {key: x.shape for key, x in like.items() if "inv_freq" not in key}
    shapes = {key: x.shape for key, x in state.items()}
    if shapes != wanted:
        odd = {k: (shapes.get(k), wanted.get(k)) for k in shapes.keys() | wanted.keys()
               if shapes.get(k) != wanted.get(k)}  # fmt: skip
        raise WouldFailSilently(f"keys that are off (there, wanted): {odd}")
    return state


def sized(config, base):
    """The configuration, if the sizes in it are those of the backbone and of the states that `head_files` makes."""
    for field in ("hidden_size", "vocab_size", "rms_norm_eps"):
        assert config.get(field, base[field]) == base[field]
    assert (base["hidden_size"], base["vocab_size"]) == (D, V)
    return config


def tgi(path, base, speculate, hidden):
    """text-generation-inference: models/__init__.py and layers/medusa.py, the layout with LM heads."""
    config = config_of(path)
    if "medusa_num_heads" not in config or "architectures" in config:
        raise WouldFailSilently("not taken for Medusa heads")
    if "model_type" in config and not (path / "tokenizer.json").exists():
        raise WouldFailSilently("the router looks for the tokenizer here")
    if not config["base_model_name_or_path"] or "head_dim" not in config:
        raise WouldFailSilently("fields are missing")
    state = load_file(path / "medusa_lm_head.safetensors")
    n_layers = sized(config, base)["medusa_num_layers"]
    return medusa_logits(strict(state, medusa_state(speculate, n_layers)), hidden)


def vllm(path, base, speculative_tokens, hidden, remaps):
    """vLLM: transformers_utils/configs/medusa.py, config/speculative.py, models/medusa.py.

    Args:
      remaps: whether it knows the authors' names (0.28 and later).
    """
    config = config_of(path)
    for key in list(config):
        if "num" in key:
            if "heads" in key:
                config["num_heads"] = config.pop(key)
            elif "layers" in key:
                config["num_hidden_layers"] = config.pop(key)
    if config.get("model_type") != "medusa":
        raise WouldFailSilently("built as another model")
    if config.get("architectures", ["MedusaModel"]) != ["MedusaModel"]:
        raise WouldFailSilently("built as the base model")
    n_heads, n_layers = speculative_tokens, config["num_hidden_layers"]
    if config["num_heads"] < n_heads:
        raise WouldFailSilently("heads without weights")
    vocab = sized(config, base)["truncated_vocab_size"]
    shared = config.get("original_lm_head")
    like = vllm_names(medusa_state(n_heads, n_layers, shared, vocab=vocab))
    if shared:
        like["lm_head.weight"] = np.zeros((vocab, D))
    if not config.get("medusa_fc_bias", False):
        like = {key: x for key, x in like.items() if "bias" not in key}
    state = {}
    for file in path.glob("*.safetensors"):
        for name, x in load_file(file).items():
            name = name.replace("medusa_heads.", "")
            if remaps:
                name = remapped(name, n_layers)
            if shared and name == "lm_heads.0.weight":
                name = "lm_head.weight"
            state[name] = x
    token_map = state.pop("token_map", None)
    if (token_map is None) != (vocab == base["vocab_size"]):
        raise WouldFailSilently("a draft vocabulary without its tokens")
    for name, x in state.items():
        if "lm_head" in name and token_map is not None and len(x) > len(token_map):
            state[name] = x[token_map]
    strict(state, like)
    lm_head = state.pop("lm_head.weight", None)
    authors = vllm_names({key: key for key in medusa_state(n_heads, n_layers, shared)})
    rows = medusa_logits({authors[key]: x for key, x in state.items()}, hidden, lm_head)
    if token_map is None:
        return rows
    logits = np.full((n_heads, base["vocab_size"]), -np.inf)
    logits[:, token_map] = rows
    return logits


def remapped(name, n_layers):
    parts = name.split(".")
    if "linear" in parts:
        return f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"
    if parts[0].isdigit() and parts[1] == str(n_layers):
        return f"lm_heads.{parts[0]}.weight"
    return name


def torch_state(path):
    """The tensors of a .pt file. `test_torch_files.py` compares reader and writer with torch's."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/version") == b"3\n"
    return {name: read_whole(tensor) for name, tensor in open_torch(str(path)).items()}


def hydra(path, base, hidden, embedded):
    """The Hydra authors' classes: mlp_head.py and prefix_mlp_head.py, with load_state_dict."""
    config, state = config_of(path), torch_state(path / "hydra_lm_head.pt")
    plus = {"prefix-mlp": True, "mlp": False}[config["hydra_head_arch"]]
    assert config["grounded_heads"] is True and config["hidden_state_offset"] == 0
    n_heads, n_layers = config["hydra_num_heads"], config["hydra_num_layers"]
    strict(state, hydra_state(n_heads, n_layers, plus))
    for k in range(n_heads):
        copies = [state[f"hydra_mlp.{k}.{2 * j + 1 if plus else j}.linear.weight"]
                  for j in range(1, n_layers)]  # fmt: skip
        # One module in the authors' code.
        assert all((x == copies[0]).all() for x in copies)
    return hydra_logits(state, hidden, embedded, n_heads, n_layers, plus)


def eagle3(path, base, streams, following):
    """vLLM's and SGLang's llama_eagle3.py: keys by name, sizes and flags from config.json.

    A flag that they do not find is false, a missing `rope_theta` 10,000; both without a word.
    """
    config, state = config_of(path), load_file(path / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    return eagle3_model(config, state, base, streams, following)


def speculators(path, base, streams, following):
    """vLLM: transformers_utils/configs/speculators, then its llama_eagle3.py; speculators' own keys.

    speculators computes with uninitialised memory where `embed_tokens.weight` is missing, vLLM takes an
    absent `norm_before_residual` for true.
    """
    config, state = config_of(path), load_file(path / "model.safetensors")
    parts, layers = config["speculators_config"], config["transformer_layer_config"]
    assert config["speculators_model_type"] == parts["algorithm"] == "eagle3"
    assert parts["proposal_methods"][0]["speculative_tokens"] > 0
    assert parts["verifier"]["name_or_path"] and layers["model_type"] == "llama"
    embedding = state.pop("embed_tokens.weight")
    assert embedding.shape == (V, D)
    passed_on = ("draft_vocab_size", "norm_before_residual", "fc_norm", "norm_output")
    fields = layers | {name: config[name] for name in passed_on}
    assert len(config["eagle_aux_hidden_state_layer_ids"]) == 3
    state = renamed(state, "layers.0.", "midlayer.")
    return eagle3_model(fields, state, base, streams, following)


def eagle3_model(config, state, base, streams, following):
    """Strict keys and shapes, then logits."""
    assert sized(config, base)["num_hidden_layers"] == 1 and "rope_theta" in config
    O, sizes = config["draft_vocab_size"], ("num_key_value_heads", "intermediate_size")
    sizes = [config[name] for name in sizes]
    strict(state, eagle3_state(O < V, config.get("fc_norm"), 0, *sizes))
    if O < V:
        assert state["d2t"].dtype == np.int64 and state["t2d"].dtype == bool
        targets = np.arange(O) + state["d2t"]
        assert np.array_equal(np.flatnonzero(state["t2d"]), targets)
    return eagle3_logits(state, streams, following, config)


def eagle(path, base, hidden, following, lm_head, engine=""):
    """EAGLE-1 with load_state_dict in its authors' model/cnets1.py; vLLM's and SGLang's models/llama_eagle.py."""
    config = config_of(path)
    if engine:
        state = load_file(path / "model.safetensors")
        names = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
        assert config["architectures"] == [names[engine]]
        # Of the attention, in both.
        assert not (config.get("bias", False) or config.get("attention_bias", False))
        biased = engine == "sglang"
    else:
        state = torch_state(path / "pytorch_model.bin")
        biased = config.get("bias", True)
    assert sized(config, base)["rope_theta"] == base["rope_theta"]
    assert config["num_hidden_layers"] == 1
    strict(state, eagle_state(biased))
    return eagle_logits(state, hidden, following, lm_head)


# What the engines in JAX look for, all of it. tpu-inference 0.32.0 (b8692ff0): models/jax/llama_eagle3.py and dflash.py,
# `load_weights`. sglang-jax cddbf6f1: srt/models/llama_eagle3.py and dflash.py, 8704afbd: dspark.py, the mappings.
_MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm"]
_LAYER = [*(f"self_attn.{n}_proj" for n in "qkvo"), *_MLP, "post_attention_layernorm"]
_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]
_EAGLE3 = [*(f"midlayer.{n}" for n in (*_LAYER, "hidden_norm")), "norm", "fc", "lm_head"]
_MARKOV = ["markov_head.markov_w1", "markov_head.markov_w2"]
# Names of the models that each starts as a drafter, tpu-inference's by vLLM's EAGLEConfig.
_STARTED = {
    "eagle3": "LlamaForCausalLM",
    "dflash": "DFlashDraftModel",
    "dspark": "Qwen3DSparkModel",
}


def jax_engine(path, kind):
    """The tensors of a directory whose keys are those that tpu-inference and sglang-jax take, and no others.

    Both read all files of weights in it.
    """
    (file,) = path.glob("*.safetensors")
    config, state = config_of(path), load_file(file)
    assert config["architectures"] == [_STARTED[kind]]
    # The first is read where there is no `rope_parameters`, in transformers 4.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    if kind == "eagle3":
        names, other = _EAGLE3, {"d2t"}
        assert config["num_hidden_layers"] == 1 and config["tie_word_embeddings"] is False
        assert (
            len(state["lm_head.weight"]) == config["draft_vocab_size"] == len(state["d2t"])
        )
        assert state["d2t"].dtype == np.int64
    else:
        layers = range(config["num_hidden_layers"])
        names = [f"layers.{j}.{n}" for j in layers for n in (*_LAYER, *_NORMS)]
        names += ["fc", "hidden_norm", "norm", *(_MARKOV if kind == "dspark" else [])]
        # sglang-jax says that it does not read the confidence.
        other = {key for key in state if key.startswith("confidence_head.")}
        table = config["dflash_config"]
        n_taps = len(table["target_layer_ids"])
        assert config["block_size"] > 1 and table["mask_token_id"] < config["vocab_size"]
        assert state["fc.weight"].shape[1] == n_taps * config["hidden_size"]
        if kind == "dspark":
            assert config["markov_rank"] > 0 and config["markov_head_type"] == "vanilla"
    wanted = {f"{name}.weight" for name in names} | other
    if state.keys() != wanted:
        raise WouldFailSilently(f"keys that are off: {state.keys() ^ wanted}")
    return state
