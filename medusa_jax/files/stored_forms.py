"""Tensors of a family's checkpoint as a Llama's, and back: names, fused matrices, order of rows, norms."""

import re
from collections.abc import Callable
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
    heads = config.n_heads, config.n_kv_heads, config.n_kv_heads
    sizes = {
        "self_attn.qkv_proj": [n * config.head_dim for n in heads],
        "mlp.gate_up_proj": [config.d_ff] * 2,
    }
    out: Tensors = {}
    for key, tensor in tensors.items():
        name = _renamed(key, family.keys)
        fused = next((f for f in FUSED if family.fused and f".{f}." in name), "")
        if not fused or tensor.shape[:1] != (sum(sizes[fused]),):
            out[name] = tensor
            continue
        ends = np.cumsum(sizes[fused])
        for part, size, end in zip(FUSED[fused], sizes[fused], ends, strict=True):
            out[name.replace(fused, part)] = take_rows(tensor, np.arange(end - size, end))
    return _converted(out, family, config, np.asarray, family.norm_offset)


def from_llama(tensors: Tensors, family: Family, config: LlamaConfig) -> Tensors:
    """The inverse of `as_llama`, except that names stay a Llama's."""
    tensors = _converted(tensors, family, config, np.argsort, -family.norm_offset)
    for fused, names in FUSED.items() if family.fused else ():
        for key in [key for key in tensors if f".{names[0]}." in key]:
            parts = [tensors.pop(key.replace(names[0], name)) for name in names]
            tensors[key.replace(names[0], fused)] = _joined(parts)
    return tensors


def _renamed(key: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        key = re.sub(rf"(^|\.){re.escape(theirs)}\.", rf"\1{ours}.", key)
    return key


def _converted(
    tensors: Tensors,
    family: Family,
    config: LlamaConfig,
    order: Callable[[np.ndarray], np.ndarray],
    offset: float,
) -> Tensors:
    """Tensors with the rows of heads in another order, and with `offset` added to the scales of norms."""
    out, rows = with_offset(tensors, offset), _plane_order(family, config)
    for key, tensor in out.items():
        turned = rows is not None and tensor.shape and _TURNED.search(key)
        if rows is not None and turned and not tensor.shape[0] % len(rows):
            firsts = np.arange(0, tensor.shape[0], len(rows))[:, None]
            out[key] = take_rows(tensor, (firsts + order(rows)[None]).ravel())
    return out


def with_offset(tensors: Tensors, offset: float) -> Tensors:
    """Tensors with this number added to the scales of norms."""
    if not offset:
        return dict(tensors)
    return {
        key: _shifted(tensor, offset) if _NORM.search(key) else tensor
        for key, tensor in tensors.items()
    }


def _plane_order(family: Family, config: LlamaConfig) -> np.ndarray | None:
    """The stored component of a head that is component i here, where plane i is (i, i + H / 2); None: the same."""
    H, turned = config.head_dim, config.rope_dim or config.head_dim
    if family.neighbours:
        return np.arange(H).reshape(-1, 2).T.ravel()
    if turned == H:
        return None
    first, second, others = np.split(np.arange(H), [turned // 2, turned])
    kept = np.split(others, 2)
    return np.concatenate([first, kept[0], second, kept[1]])


def _shifted(tensor: Tensor, offset: float) -> Tensor:
    def read(index: Index) -> np.ndarray:
        return tensor.read(index).astype(np.float32) + np.float32(offset)

    return replace(tensor, dtype="float32", read=read)


def _joined(parts: list[Tensor]) -> Tensor:
    def read(index: Index) -> np.ndarray:
        return np.concatenate([read_whole(part) for part in parts])[index]

    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return replace(parts[0], shape=shape, read=read)
