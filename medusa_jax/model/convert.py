"""Convert stored parameters to the form that decoding reads, one entry at a time.

An entry of the parameter tree is, for example, {"layers_3": ...}. Loaders convert each entry before they read
the next (argument `convert`), so a device never holds more than the converted model plus one unconverted layer.
"""

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import ACTIVATION_BITS, DRAFT_WEIGHTS, WEIGHTS, LlamaConfig
from medusa_jax.errors import UserError, one_of
from medusa_jax.model.blocks import split_blocks
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.llama import Llama, decoding_config, init_params
from medusa_jax.model.stored import Codes, Storage, int8_codes
from medusa_jax.sharding import Params, param_shardings

# Names of parameters that multiply: kernels, and the factors of low-rank LM heads.
KERNELS = ("kernel", "down", "up")


def choose_storage(
    kernels: Kernels,
    dtype: DTypeLike,
    mesh: Mesh,
    weights: str | None = None,
    draft_weights: str | None = None,
    activations: int = 16,
) -> Storage:
    """The form in which parameters are stored on these devices, in the panels of the kernels.

    Args:
      weights: type to store kernels in, one of `WEIGHTS`; None is `dtype`.
      draft_weights: type for draft heads, one of `DRAFT_WEIGHTS`; None is the default of `Storage`.
      activations: bits, one of `ACTIVATION_BITS`.

    Raises:
      UserError: an unknown type or form, or one that is not available here.
    """
    if activations not in ACTIVATION_BITS:
        raise UserError(f"activations have 16 or 8 bits, not {activations}")
    one_of("the type of weights", weights or WEIGHTS[0], WEIGHTS)
    one_of("the type of draft weights", draft_weights or WEIGHTS[1], DRAFT_WEIGHTS)
    if "int8" in (weights, draft_weights) and mesh.size > 1:
        raise UserError("int8 weights are read on one device: use --mesh 1,1,1")
    is_default = weights in (None, jnp.dtype(dtype).name)
    weights = "" if is_default else weights or ""
    return Storage(kernels.panel, weights, draft_weights or "", activations)


def decoder(
    config: LlamaConfig, dtype: DTypeLike, mesh: Mesh, storage: Storage, kernels: Kernels
) -> Llama:
    """The backbone for parameters from `place_part`."""
    shards = fused_shards(mesh, storage)
    config = decoding_config(config)
    return Llama(config, dtype, shards=shards, mesh=mesh, kernels=kernels)


def fused_shards(mesh: Mesh, storage: Storage) -> int:
    """`Llama.shards` of these devices; 0 for panels, whose layers are one call anyway."""
    return 0 if storage.panel else mesh.shape["tensor"]


def place_part(
    config: LlamaConfig,
    part: Params,
    dtype: DTypeLike,
    mesh: Mesh,
    storage: Storage,
    kernels: Kernels,
) -> Params:
    """Fuse and place an entry of the backbone, with its kernels in the form of `storage`.

    Waits for the device, so that the caller can free the original.
    """
    [(name, inner)] = part.items()
    blocks, plain = split_blocks(inner)
    if blocks:
        if plain:
            others = place_part(config, {name: plain}, dtype, mesh, storage, kernels)
            plain = others[name]
        return kernels.read_blocks(config, name, blocks, plain, storage.activations)
    # One program places every layer; the sharding table needs only one layer's name.
    entry_name = "layers_0" if name.startswith("layers_") else name
    out = jax.block_until_ready(
        _prepared({entry_name: inner}, config, dtype, mesh, storage, kernels)
    )
    return {name if entry == entry_name else entry: value for entry, value in out.items()}


def place_head(part: Params, storage: Storage, kernels: Kernels) -> Params:
    """Convert the kernels of an entry of the draft heads, already in its type, to the form of `storage`."""
    if storage.panel:  # by NumPy: XLA would still be compiling when that is done
        return jax.device_put(store(jax.tree.map(np.asarray, part), storage, kernels))
    return jax.block_until_ready(_in_form(part, storage, kernels))


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _prepared(
    part: Params,
    config: LlamaConfig,
    dtype: DTypeLike,
    mesh: Mesh,
    storage: Storage,
    kernels: Kernels,
) -> Params:
    out = prepare(part, config, dtype, fused_shards(mesh, storage))
    out = jax.lax.with_sharding_constraint(out, param_shardings(mesh, out))
    return store(out, storage, kernels)


def store(params: Any, storage: Storage, kernels: Kernels = PLAIN) -> Any:
    """Convert the kernels of a tree to the form of `storage`; other leaves are unchanged.

    Args:
      kernels: make the panels, if there are any.
    """
    if not isinstance(params, dict):
        return params
    return {
        name: _stored(value, storage, kernels)
        if name in KERNELS and hasattr(value, "ndim")
        else store(value, storage, kernels)
        for name, value in params.items()
    }


_in_form = jax.jit(store, static_argnums=(1, 2))


def _stored(kernel: jax.Array, storage: Storage, kernels: Kernels) -> Any:
    flat = kernel.reshape(kernel.shape[0], -1)  # a fused kernel [inputs, 1, outputs], too
    scales = None
    if storage.converted == "int8":
        flat, scales = int8_codes(flat)
        scales = scales[0] / 127
    elif storage.converted:
        flat = flat.astype(storage.converted)
    if storage.panel:
        return kernels.panels(flat, scales, storage)
    if scales is not None:
        return Codes(flat, scales)
    return flat.reshape(kernel.shape)


def prepare(
    params: Params, config: LlamaConfig, dtype: DTypeLike, shards: int = 1
) -> Params:
    """Parameters for decoding: cast to `dtype`, q/k/v and gate/up fused into one kernel each.

    A tied LM head becomes a separate kernel [D, V]: products with rows of the embedding are up to three
    times slower on a CPU, and a step reads it once either way.

    Kernels are fused per tensor shard: with 2 shards the fused outputs are [q0 k0 v0 | q1 k1 v1], so splitting
    the fused kernel over devices also splits q, k and v. Use with
    `Llama(decoding_config(config), dtype, shards=shards)`; with 0 nothing is fused.

    Args:
      params: the whole tree, or some of its entries, such as {"layers_3": ...}.
    """

    def fuse(parts: list[Params]) -> Params:
        fused = {}
        for leaf in parts[0]:
            grouped = [p[leaf].reshape(*p[leaf].shape[:-1], shards, -1) for p in parts]
            fused[leaf] = jnp.concatenate(grouped, axis=-1)
        return fused

    def fuse_layer(layer: Params) -> Params:
        attention, mlp = dict(layer["self_attn"]), dict(layer["mlp"])
        qkv = [attention.pop(name) for name in ("q_proj", "k_proj", "v_proj")]
        attention["qkv_proj"] = fuse(qkv)
        if config.gated_mlp:
            mlp["gate_up_proj"] = fuse([mlp.pop("gate_proj"), mlp.pop("up_proj")])
        return layer | {"self_attn": attention, "mlp": mlp}

    out = {
        name: fuse_layer(inner) if shards and name.startswith("layers_") else inner
        for name, inner in params.items()
    }
    if config.tie_embeddings and "embed_tokens" in params:
        out["lm_head"] = {"kernel": params["embed_tokens"]["embedding"].T}
    return jax.tree.map(lambda x: x.astype(dtype), out)


@lru_cache(maxsize=16)
def abstract_params(config: LlamaConfig) -> Params:
    """Shapes of a backbone's parameters; traces one layer only."""
    one_layer = dataclasses.replace(config, n_layers=1)
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(partial(init_params, one_layer), key)
    layer = shapes.pop("layers_0")
    shapes |= {f"layers_{i}": layer for i in range(config.n_layers)}
    return dict(sorted(shapes.items()))
