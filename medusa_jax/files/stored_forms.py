"""Tensors of a family's checkpoint as a Llama's, and back: names, fused matrices, order of rows, norms."""

import re
from dataclasses import replace

import numpy as np

from medusa_jax.arch import LlamaConfig
from medusa_jax.files.families import Family
from medusa_jax.files.tensor import Index, Tensor, Tensors, read_whole, take_rows

# A fused matrix of a layer -> its parts, in order.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_NORM = re.compile(r"norm\.weight$")
_TURNED = re.compile(r"\.self_attn\.[qk]_(proj\.(weight|bias)|norm\.weight)$")


def as_llama(tensors: Tensors, family: Family, config: LlamaConfig) -> Tensors:
    """The tensors of a checkpoint by the keys of a Llama, each as a Llama has it."""
    tensors = {_renamed(key, family.keys): tensor for key, tensor in tensors.items()}
    tensors = _split(tensors, family.fused, config)
    tensors = reordered(tensors, _plane_order(family, config))
    return with_offset(tensors, family.norm_offset)


def from_llama(tensors: Tensors, family: Family, config: LlamaConfig) -> Tensors:
    """The inverse of `as_llama`."""
    order_H = np.argsort(_plane_order(family, config))
    tensors = with_offset(reordered(tensors, order_H), -family.norm_offset)
    for fused in family.fused:
        names = FUSED[fused]
        for key in [key for key in tensors if f".{names[0]}." in key]:
            parts = [tensors.pop(key.replace(names[0], name)) for name in names]
            tensors[key.replace(names[0], fused)] = _joined(parts)
    theirs = {ours: theirs for theirs, ours in reversed(family.keys.items())}
    return {_renamed(key, theirs): tensor for key, tensor in tensors.items()}


def _renamed(key: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        key = re.sub(rf"(^|\.){re.escape(theirs)}\.", rf"\1{ours}.", key)
    return key


def _split(tensors: Tensors, names: tuple[str, ...], config: LlamaConfig) -> Tensors:
    """Tensors with the parts of these fused ones; they stay whole if their shape is another."""
    keys = config.n_kv_heads * config.head_dim
    all_sizes = [config.n_heads * config.head_dim, keys, keys], [config.d_ff] * 2
    sizes = dict(zip(FUSED, all_sizes))
    out: Tensors = {}
    for key, tensor in tensors.items():
        fused = next((f for f in names if f".{f}." in key), "")
        if not fused or tensor.shape[:1] != (sum(sizes[fused]),):
            out[key] = tensor
            continue
        parts = np.split(np.arange(sum(sizes[fused])), np.cumsum(sizes[fused])[:-1])
        for part, rows in zip(FUSED[fused], parts):
            out[key.replace(fused, part)] = take_rows(tensor, rows)
    return out


def reordered(tensors: Tensors, order_H: np.ndarray) -> Tensors:
    """Tensors whose heads of queries and keys have their components in this order."""
    H, out = len(order_H), dict(tensors)
    if (order_H == np.arange(H)).all():
        return out
    for key, tensor in tensors.items():
        if _TURNED.search(key) and tensor.shape and not tensor.shape[0] % H:
            heads = np.arange(tensor.shape[0]).reshape(-1, H)
            out[key] = take_rows(tensor, heads[:, order_H].ravel())
    return out


def with_offset(tensors: Tensors, offset: float) -> Tensors:
    """Tensors with this number added to the scales of norms."""

    def shifted(norm: Tensor) -> Tensor:
        def read(index: Index) -> np.ndarray:
            return norm.read(index).astype(np.float32) + np.float32(offset)

        return replace(norm, dtype="float32", read=read)

    norms = [key for key in tensors if offset and _NORM.search(key)]
    return tensors | {key: shifted(tensors[key]) for key in norms}


def from_neighbours(H: int) -> np.ndarray:
    """The order of components that puts neighbours (2i, 2i + 1) into one plane, (i, i + H / 2)."""
    return np.arange(H).reshape(-1, 2).T.ravel()


def _plane_order(family: Family, config: LlamaConfig) -> np.ndarray:
    """The stored component of a head that is component i here, where plane i is (i, i + H / 2)."""
    H = config.head_dim
    rotated, kept = np.split(np.arange(H), [config.rope_dim or H])
    if family.neighbours:
        rotated = from_neighbours(len(rotated))
    halves = zip(np.split(rotated, 2), np.split(kept, 2))
    return np.concatenate([part for half in halves for part in half])


def _joined(parts: list[Tensor]) -> Tensor:
    def read(index: Index) -> np.ndarray:
        return np.concatenate([read_whole(part) for part in parts])[index]

    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return replace(parts[0], shape=shape, read=read)
