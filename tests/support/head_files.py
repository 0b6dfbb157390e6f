"""Draft heads as others publish them, made here, and their logits by hand from the files' keys.

Everything is NumPy in float64, written from the layouts' descriptions (docs/formats.md) and not
from the package: what it reads back is checked against this.
"""

import dataclasses
import json

import numpy as np
from numpy_layers import decoder_layer, numpy_norm, silu
from safetensors.numpy import save_file
from tiny import tiny_arch

from medusa_jax.config import LlamaConfig
from medusa_jax.files.torch_writer import save_torch

LLAMA = tiny_arch(n_layers=1, head_dim=4, max_position=LlamaConfig.max_position)
# Of a vocabulary that does not fit LLAMA's files.
WIDER = tiny_arch(vocab_size=64, d_model=32, head_dim=8, d_ff=48, max_position=4096)
V, D = LLAMA.vocab_size, LLAMA.d_model


def normal(rng, *shape, dtype=np.float32):
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)


def medusa_state(n_heads=3, n_layers=1, shared=False, prefix="", seed=0, vocab=V):
    """{prefix}{k}.{j}.linear.weight, .bias and, unless shared, {prefix}{k}.{L}.weight."""
    rng, state = np.random.default_rng(seed), {}
    for k in range(n_heads):
        for j in range(n_layers):
            state[f"{prefix}{k}.{j}.linear.weight"] = 3 * normal(rng, D, D)
            state[f"{prefix}{k}.{j}.linear.bias"] = normal(rng, D)
        if not shared:
            state[f"{prefix}{k}.{n_layers}.weight"] = normal(rng, vocab, D)
    return state


def vllm_names(state):
    """Medusa's tensors by vLLM's keys."""
    names = {}
    for key, x in state.items():
        k, j, *rest = key.split(".")
        block = f"blocks.{k}.layers.{j}.{rest[-1]}"
        names[block if "linear" in rest else f"lm_heads.{k}.weight"] = x
    return names


def hydra_state(n_heads=3, n_layers=3, plus=False, seed=0, tied=True, kv_heads=None):
    """Released Hydra heads; with `plus` those of Hydra++, dropout modules among the layers."""
    rng, state = np.random.default_rng(seed), {}
    for k in range(n_heads):
        later = {"weight": 3 * normal(rng, D, D), "bias": normal(rng, D)}
        for j in range(n_layers):
            layer = f"hydra_mlp.{k}.{2 * j + 1 if plus else j}"
            if j == 0:
                for part in ("linear", "res_connection"):
                    state[f"{layer}.{part}.weight"] = 2 * normal(rng, D, (k + 2) * D)
                    state[f"{layer}.{part}.bias"] = normal(rng, D)
            else:
                if not tied:
                    later = {n: x + np.float32(0.1) * j for n, x in later.items()}
                state |= {f"{layer}.linear.{n}": x for n, x in later.items()}
        out = f"hydra_lm_head.{k}{'.1' if plus else ''}"
        state |= {f"{out}.weight": normal(rng, V, D), f"{out}.bias": normal(rng, V)}
    state["input_embed_fn.weight"] = normal(rng, V, D)
    if plus:
        state |= prefix_layer(rng, kv_heads or LLAMA.n_kv_heads)
    return state


def prefix_layer(rng, kv_heads=LLAMA.n_kv_heads):
    """One Llama layer with an embedding that nothing reads and a rotary table."""
    q, kv = LLAMA.n_heads * LLAMA.head_dim, kv_heads * LLAMA.head_dim
    sizes = {"self_attn.q": (q, D), "self_attn.k": (kv, D), "self_attn.v": (kv, D)}
    sizes |= {"self_attn.o": (D, q), "mlp.gate": (LLAMA.d_ff, D), "mlp.up": (LLAMA.d_ff, D)}
    sizes |= {"mlp.down": (D, LLAMA.d_ff)}
    stem = "prefix_embeding_layer"
    state = {
        f"{stem}.layers.0.{name}_proj.weight": 2 * normal(rng, *size)
        for name, size in sizes.items()
    }
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        state[f"{stem}.{norm}.weight"] = 1 + normal(rng, D)
    state[f"{stem}.embed_tokens.weight"] = normal(rng, V, D)
    state[f"{stem}.layers.0.self_attn.rotary_emb.inv_freq"] = normal(rng, 2)
    return state


def eagle_state(bias=True, seed=0):
    """Released EAGLE-1 heads: one layer without a norm before it, FC over [embedding ; hidden]."""
    rng = np.random.default_rng(seed)
    state = {
        key.removeprefix("prefix_embeding_layer."): x
        for key, x in prefix_layer(rng).items()
    }
    del state["norm.weight"], state["layers.0.input_layernorm.weight"]
    state["fc.weight"] = 2 * normal(rng, D, 2 * D)
    return state | ({"fc.bias": normal(rng, D)} if bias else {})


# Tokens that EAGLE-3 heads score, and their layer: twice the key/value heads and another rotation than
# the model's.
IDS = np.array([0, 1, 3, 4, 6, 9, 10, 15, 17, 21, 22])
KV3, THETA3, FF3 = 4, 500.0, 28


def eagle3_state(narrow=True, newer=False, seed=0, kv_heads=KV3, ff=FF3):
    """Released EAGLE-3 heads, over IDS or all tokens; `newer` with the norms of 3.1."""
    rng, N, H = np.random.default_rng(seed), LLAMA.n_heads, LLAMA.head_dim
    shapes = {
        "fc": (D, 3 * D),
        "midlayer.self_attn.q_proj": (N * H, 2 * D),
        "midlayer.self_attn.k_proj": (kv_heads * H, 2 * D),
        "midlayer.self_attn.v_proj": (kv_heads * H, 2 * D),
        "midlayer.self_attn.o_proj": (D, N * H),
        "midlayer.mlp.gate_proj": (ff, D),
        "midlayer.mlp.up_proj": (ff, D),
        "midlayer.mlp.down_proj": (D, ff),
        "lm_head": (len(IDS) if narrow else V, D),
    }
    state = {f"{name}.weight": 2 * normal(rng, *shape) for name, shape in shapes.items()}
    norms = ["norm", *(f"fc_norm.{a}" for a in range(3) if newer)]
    norms += [f"midlayer.{n}" for n in ("hidden_norm", "input_layernorm")]
    for name in (*norms, "midlayer.post_attention_layernorm"):
        state[f"{name}.weight"] = 1 + normal(rng, D)
    if narrow:
        state |= {"d2t": IDS - np.arange(len(IDS)), "t2d": np.isin(np.arange(V), IDS)}
    return state


EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": FF3,
    "num_attention_heads": LLAMA.n_heads,
    "num_key_value_heads": KV3,
    "head_dim": LLAMA.head_dim,
    "num_hidden_layers": 1,
    "rms_norm_eps": LLAMA.rms_eps,
    "rope_theta": THETA3,
    "vocab_size": V,
    "draft_vocab_size": len(IDS),
    "use_cache": True,
}


# Published versions, (over IDS or all tokens, flags): the paper's, 3.1, a variant.
VERSIONS = [
    (True, {}),
    (False, {"fc_norm": True, "norm_output": True}),
    (True, {"norm_before_residual": True}),
]


def eagle3_version(narrow, flags):
    """Tensors and fields of config.json of one of `VERSIONS`."""
    fields = flags | {"draft_vocab_size": len(IDS) if narrow else V}
    return eagle3_state(narrow, "fc_norm" in flags), fields


# The same heads as speculators writes them (c05b95b, transformers 5.15): config.json, and `renamed` keys.
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": len(IDS),
    "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [0, 0, 1],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "owner/base"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.7.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        name: x
        for name, x in EAGLE3.items()
        if name not in ("architectures", "draft_vocab_size", "rope_theta")
    }
    | {"rope_parameters": {"rope_theta": THETA3, "rope_type": "default"}},
    "transformers_version": "5.15.1",
}


def renamed(state, old="midlayer.", new="layers.0."):
    """The tensors under the other name of the layer."""
    return {key.replace(old, new): x for key, x in state.items()}


EAGLE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
EAGLE |= {"hidden_size": D, "intermediate_size": LLAMA.d_ff, "vocab_size": V}
EAGLE |= {"num_attention_heads": LLAMA.n_heads, "num_key_value_heads": LLAMA.n_kv_heads}
EAGLE |= {"num_hidden_layers": 1, "rms_norm_eps": LLAMA.rms_eps}


# As published: the configuration says two heads, whatever the file holds.
V13 = {"base_model_name_or_path": "base", "medusa_num_heads": 2, "medusa_num_layers": 1}
HYDRA = {"hydra_num_heads": 3, "hydra_num_layers": 3, "grounded_heads": True}
HYDRA |= {"hidden_state_offset": 0}
# Files of every trainer: (tensors, name, config.json).
FILES = {
    "vllm": (vllm_names(medusa_state(3)), "model.safetensors", {"medusa_fc_bias": True}),
    "medusa": (medusa_state(3), "medusa_lm_head.pt", V13),
    "hydra": (hydra_state(), "hydra_lm_head.pt", HYDRA),
    "eagle": (eagle_state(), "pytorch_model.bin", EAGLE),
    "eagle3": (eagle3_state(), "model.safetensors", EAGLE3),
    "speculators": (renamed(eagle3_state()), "model.safetensors", SPECULATORS),
}


def write(folder, state, name, config=None):
    """A file of weights, .pt or .safetensors, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(state, folder / name)
    else:
        save_torch(str(folder / name), state)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def wide(state):
    return {key: np.asarray(x, np.float64) for key, x in state.items()}


def medusa_logits(state, hidden, lm_head=None, prefix=""):
    """[K, V] of every head after one hidden state [D]; `lm_head` [V, D] if it is shared."""
    state, rows = wide(state), []
    n_heads = 1 + max(int(key.removeprefix(prefix).split(".")[0]) for key in state)
    for k in range(n_heads):
        x, j = hidden, 0
        while f"{prefix}{k}.{j}.linear.weight" in state:
            layer = f"{prefix}{k}.{j}.linear"
            x = x + silu(state[f"{layer}.weight"] @ x + state.get(f"{layer}.bias", 0))
            j += 1
        out = state[f"{prefix}{k}.{j}.weight"] if lm_head is None else lm_head
        rows.append(out @ x)
    return np.stack(rows)


def hydra_logits(state, hidden, embedded, n_heads=3, n_layers=3, plus=False):
    """[K, V] after the last of the hidden states [T, D]; `embedded` [K, D] of later tokens."""
    state = wide(state)
    x, rows = (prefix_output(state, hidden) if plus else hidden)[-1], []
    for k in range(n_heads):
        x = np.concatenate([x, embedded[k]])
        y = x
        for j in range(n_layers):
            layer = f"hydra_mlp.{k}.{2 * j + 1 if plus else j}"
            w, b = state[f"{layer}.linear.weight"], state[f"{layer}.linear.bias"]
            skip = y
            if j == 0:
                skip = state[f"{layer}.res_connection.weight"] @ y
                skip = skip + state[f"{layer}.res_connection.bias"]
            y = skip + silu(w @ y + b)
        out = f"hydra_lm_head.{k}{'.1' if plus else ''}"
        rows.append(state[f"{out}.weight"] @ y + state[f"{out}.bias"])
    return np.stack(rows)


def weights_of(state, stem):
    """A layer's matrices [in, out] and norms by name."""

    def weight(name):
        x = state.get(f"{stem}.{name}.weight")
        return None if x is None else x.T

    return weight


def prefix_output(state, x):
    """Hydra++'s decoder layer and its norm over hidden states [T, D]."""
    x = decoder_layer(LLAMA, weights_of(state, "prefix_embeding_layer.layers.0"), x)
    return numpy_norm(state["prefix_embeding_layer.norm.weight"], x, LLAMA.rms_eps)


def eagle_logits(state, hidden, following, lm_head, depth=4, eps=LLAMA.rms_eps):
    """[depth, V] after the hidden states [T, D], every level fed back to the next.

    Args:
      following: embeddings [T + depth - 1, D] of the tokens after each position.
    """
    state, rows, logits = wide(state), hidden, []
    shape = dataclasses.replace(LLAMA, rms_eps=eps)
    for _ in range(depth):
        both = np.concatenate([following[: len(rows)], rows], -1)
        x = both @ state["fc.weight"].T + state.get("fc.bias", 0)
        f = decoder_layer(shape, weights_of(state, "layers.0"), x)[-1]
        logits.append(lm_head @ f)
        rows = np.concatenate([rows, f[None]])
    return np.stack(logits)


def eagle3_logits(state, streams, following, config, depth=4):
    """[depth, O] after the streams [T, 3 D], every level fed back to the next as its flags say."""
    state, logits, eps = wide(state), [], config.get("rms_norm_eps", LLAMA.rms_eps)
    rms = lambda name, x: numpy_norm(state[f"{name}.weight"], x, eps)  # noqa: E731
    shape = dataclasses.replace(
        LLAMA,
        rms_eps=eps,
        n_kv_heads=config["num_key_value_heads"],
        rope_theta=config.get("rope_theta", 10000.0),
    )
    parts = np.split(streams, 3, axis=1)
    if config.get("fc_norm"):
        parts = [rms(f"fc_norm.{a}", x) for a, x in enumerate(parts)]
    rows = np.concatenate(parts, -1) @ state["fc.weight"].T
    for _ in range(depth):
        e = rms("midlayer.input_layernorm", following[: len(rows)])
        normed = rms("midlayer.hidden_norm", rows)
        x = normed if config.get("norm_before_residual") else rows
        both = np.concatenate([e, normed], -1)
        a = decoder_layer(shape, weights_of(state, "midlayer"), x, both)[-1]
        out = rms("norm", a)
        logits.append(state["lm_head.weight"] @ out)
        rows = np.concatenate([rows, (out if config.get("norm_output") else a)[None]])
    return np.stack(logits)
