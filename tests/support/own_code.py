"""Run draft heads of a directory by an engine's own loader and model classes, on a CPU, in the engine's environment.

    python own_code.py ENGINE KIND DIRECTORY IN.npz OUT.npz

The classes are unmodified. Packages of which they import names alone are stubs (`stubs.py`), and attention, which needs
a TPU, is plain attention. IN: streams [T, A D], tokens [T + 1] and positions [T + 1] of the text, embedding and
lm_head [V, D]. OUT: fused [T, D], logits (EAGLE-3: [T + 1, O], the last one of the second level; DFlash: [slots, V]), and
the ids of the draft vocabulary. Nothing of our package is used.
"""

import sys
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from stubs import stub
from transformers import AutoConfig


def attend(q, k, v, causal):
    """[T, N, H] on [S, K, H], scaled already, in NumPy; of a text the last T rows, if causal."""
    R = q.shape[1] // k.shape[1]
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    scores = np.einsum("tnh,snh->nts", q, k.repeat(R, 1))
    seen = np.tri(len(q), len(k), len(k) - len(q), dtype=bool)
    weights = np.exp(np.where(seen | (not causal), scores, -np.inf) - scores.max())
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights, v.repeat(R, 1))


def tpu_inference(kind, directory, given):
    """tpu-inference 0.32.0: load_hf_weights raises for unknown keys, check_all_loaded for missing ones."""
    stub(
        "torch", "torchax", "vllm", "torchvision", "qwix", "tokamax", "pathwaysutils", "numba", "requests",
        "sympy", "jaxtyping", "runai_model_streamer",
    )  # fmt: skip
    from tpu_inference.layers.common.attention_metadata import AttentionMetadata
    from tpu_inference.models.jax import dflash, llama3, llama_eagle3

    config = AutoConfig.from_pretrained(directory)
    (name,) = config.architectures
    if kind == "eagle3":  # vLLM's EAGLEConfig: names that have Eagle3 in them stay
        name = name if "Eagle3" in name else f"Eagle3{name}"
    registered = {"Eagle3LlamaForCausalLM": llama_eagle3.EagleLlama3ForCausalLM}
    registered["DFlashDraftModel"] = dflash.DFlashForCausalLM
    size, V = config.head_dim, config.vocab_size
    target = AutoConfig.for_model("qwen3" if kind == "dflash" else "llama")
    drafter = SimpleNamespace(
        hf_config=config, model=directory, hf_overrides=None, is_multimodal_model=False,
        get_head_size=lambda: size, get_hidden_size=lambda: config.hidden_size,
    )  # fmt: skip
    settings = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=drafter, method=kind),
        model_config=SimpleNamespace(
            get_head_size=lambda: size, get_vocab_size=lambda: V, dtype=jnp.bfloat16, seed=0,
            model=directory, hf_config=target,
        ),
        load_config=SimpleNamespace(download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=None,
    )  # fmt: skip

    def attention(
        kv_cache, q, k, v, attention_metadata, mesh, head_dim_original, use_causal_mask=True, **rest
    ):  # fmt: skip
        new = [x if old is None else jnp.concatenate([old, x])
               for old, x in zip(kv_cache or (None, None), (k, v))]  # fmt: skip
        out = attend(q * head_dim_original**-0.5, *new, use_causal_mask)
        return new, jnp.asarray(out, q.dtype)

    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "attn_dp", "model"))
    with jax.set_mesh(mesh), patch.object(llama3, "attention", attention), \
            patch.object(dflash, "attention", attention):  # fmt: skip
        key = jax.random.key(0)
        model = nnx.eval_shape(lambda: registered[name](settings, key, mesh))
        model.load_weights(key)
        model.model.embed_tokens.embedding.value = given["embedding"]
        at, tokens = given["positions"], given["tokens"]

        def metadata(positions):
            return AttentionMetadata(
                input_positions=positions, seq_lens=jnp.array([len(positions)])
            )

        fused = model.combine_hidden_states(given["streams"])
        if kind == "eagle3":
            ids = jnp.arange(config.draft_vocab_size) + model.draft_id_to_target_id.value
            _, out, (state,), _ = model([None], tokens[1:], fused, metadata(at[:-1]))
            logits = model.compute_logits(out)
            # The greedy token of the last row, and the row's output, are the next level's inputs.
            drafted = jnp.append(tokens[1:], logits[-1].argmax())
            rows = jnp.concatenate([fused, state[-1:]])
            _, out, _, _ = model([None], drafted, rows, metadata(at))
            logits = jnp.append(logits, model.compute_logits(out)[-1:], 0)
            return fused, logits[:, ids], ids
        model.lm_head.weight.value = given["lm_head"].T
        slots = jnp.full(config.block_size, model.mask_token_id).at[0].set(tokens[-1])
        where = at[-1] + jnp.arange(config.block_size)
        caches = [None] * config.num_hidden_layers
        hidden = (fused, jnp.array([0, len(fused)]), at[:-1])
        _, out, _, _ = model(caches, slots, hidden, metadata(where))
        return fused, model.compute_logits(out), jnp.arange(V)


def sglang_jax(kind, directory, given):
    """sglang-jax cddbf6f1, which reads the keys of its mappings and none else; a missing one is a line of its log."""
    stub("torch", "zmq", "fastapi", "orjson", "partial_json_parser")
    from sgl_jax.srt.configs.model_config import ModelConfig
    from sgl_jax.srt.models import dflash, llama_eagle3
    from sgl_jax.srt.speculative.dflash_util import parse_dflash_draft_config

    classes = {"LlamaForCausalLMEagle3": llama_eagle3.LlamaForCausalLMEagle3}
    classes["DFlashDraftModel"] = dflash.DFlashDraftModel
    settings = ModelConfig(directory, is_draft_model=True, dtype="bfloat16")
    config, (name,) = settings.hf_config, settings.hf_config.architectures
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=explicit)
    rows = jax.NamedSharding(mesh, jax.P("data", "tensor"))
    there = []

    def attention(q, k, v, layer, *rest, **more):
        if there:  # what DFlash has of the text
            k, v = (jnp.concatenate(pair) for pair in zip(there[layer.layer_id], (k, v)))
        causal = layer.attn_type.value == "decoder"
        out = attend(q * layer.scaling, k, v, causal).reshape(len(q), -1)
        return jax.device_put(jnp.asarray(out, q.dtype), rows), None

    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: classes[name](config, mesh=mesh, dtype=jnp.bfloat16))
        model.load_weights(settings)
        if kind == "dflash":
            tokens, at = given["tokens"], given["positions"]
            there += model.materialize_kv(given["streams"], at[:-1])
            draft = parse_dflash_draft_config(directory)
            slots = jnp.full(draft.block_size, draft.mask_token_id).at[0].set(tokens[-1])
            batch = SimpleNamespace(
                positions=at[-1] + jnp.arange(draft.block_size), attn_backend=attention,
                input_embedding=given["embedding"][slots],
            )  # fmt: skip
            out, _ = model.model(batch, None)
            fused = model.project_target_hidden(given["streams"])
            return fused, out @ given["lm_head"].T, jnp.arange(config.vocab_size)
        model.model.embed_tokens.embedding.value = given["embedding"]

        def run(hidden, tokens, positions):
            batch = SimpleNamespace(
                input_ids=tokens, positions=positions, attn_backend=attention,
                spec_info=SimpleNamespace(hidden_states=hidden),
            )  # fmt: skip
            out, (state,), _, _ = model.model(batch, None)
            return out @ model.lm_head.embedding.value.T, state

        tokens, at, ids = given["tokens"], given["positions"], model.hot_token_ids.value
        fused = model.model.fc(given["streams"])[0]
        logits, state = run(given["streams"], tokens[1:], at[:-1])
        drafted = jnp.append(tokens[1:], ids[logits[-1].argmax()])
        second, _ = run(jnp.concatenate([fused, state[-1:]]), drafted, at)
        return fused, jnp.append(logits, second[-1:], 0), ids


def main(engine, kind, directory, inputs, outputs):
    arrays = np.load(inputs)
    given = {
        name: jnp.asarray(
            arrays[name], jnp.int32 if arrays[name].ndim == 1 else jnp.bfloat16
        )
        for name in arrays
    }
    fused, logits, ids = globals()[engine](kind, directory, given)
    fused, logits = (np.asarray(x, np.float32) for x in (fused, logits))
    np.savez(outputs, fused=fused, logits=logits, ids=np.asarray(ids))


if __name__ == "__main__":
    main(*sys.argv[1:])
