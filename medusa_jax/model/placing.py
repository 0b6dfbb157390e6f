"""Convert stored parameters to the form that decoding reads, one entry at a time.

An entry of the parameter tree is, for example, {"layers_3": ...}. Loaders convert each before they read the
next (their argument `convert`), so a device never holds more than the converted model and one layer twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.config import LlamaConfig
from medusa_jax.model.block_rows import in_blocks, packed, without_blocks
from medusa_jax.model.llama import Llama, decoding_config, prepare
from medusa_jax.model.stored import Storage, store
from medusa_jax.native import library
from medusa_jax.sharding import Params, param_shardings

# Linear maps that `prepare` makes one of.
FUSED = {
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}

_in_form = jax.jit(store, static_argnums=1)


def decoder(config: LlamaConfig, dtype: DTypeLike, mesh: Mesh, storage: Storage) -> Llama:
    """The backbone for parameters from `place_part`."""
    kernels = library() if storage.panel and dtype == jnp.float32 else None
    return Llama(
        decoding_config(config),
        dtype,
        shards=mesh.shape["tensor"],
        mesh=mesh,
        native=kernels is not None and kernels.attends(config.head_dim),
    )


def place_part(
    config: LlamaConfig, part: Params, dtype: DTypeLike, mesh: Mesh, storage: Storage
) -> Params:
    """Fuse and place an entry of the backbone, with its kernels in the form of `storage`.

    Waits for the device, so that the caller can free the original.
    """
    [(name, inner)] = part.items()
    if blocks := in_blocks(inner):
        return _place_blocks(config, part, blocks, dtype, mesh, storage)
    # All layers are one program, and one name serves the table for all.
    known = "layers_0" if name.startswith("layers_") else name
    out = jax.block_until_ready(_prepared({known: inner}, config, dtype, mesh, storage))
    return {name if entry == known else entry: value for entry, value in out.items()}


def _place_blocks(
    config: LlamaConfig,
    part: Params,
    blocks: Params,
    dtype: DTypeLike,
    mesh: Mesh,
    storage: Storage,
) -> Params:
    """A part whose kernels are `BlockRows`: these as panels of the same blocks, fused."""
    [(name, inner)] = part.items()
    if name == "embed_tokens":
        rows = blocks["embedding"]
        panels = packed([rows]) if rows.packs or config.tie_embeddings else None
        embedding = panels if rows.packs else jnp.asarray(rows.blocks.unpacked(slice(None)))
        # A tied LM head is the same panels.
        head = {"lm_head": {"kernel": panels}} if config.tie_embeddings else {}
        return {name: {"embedding": embedding}, **head}
    if name == "lm_head":
        return {name: {"kernel": packed([blocks["kernel"]])}}
    rest = {name: without_blocks(inner)}
    [(_, placed)] = place_part(config, rest, dtype, mesh, storage).items()
    for group, fused in FUSED.items():
        for linear, names in fused.items():
            kernels = [blocks[group][each]["kernel"] for each in names]
            placed[group].setdefault(linear, {})["kernel"] = packed(kernels)
    return {name: placed}


def place_head(part: Params, form: Storage) -> Params:
    """Convert the kernels of an entry of the draft heads, already in its type, to `form`."""
    return jax.block_until_ready(_in_form(part, form))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _prepared(
    part: Params, config: LlamaConfig, dtype: DTypeLike, mesh: Mesh, storage: Storage
) -> Params:
    out = prepare(part, config, dtype, mesh.shape["tensor"])
    out = jax.lax.with_sharding_constraint(out, param_shardings(mesh, out))
    return store(out, storage)
