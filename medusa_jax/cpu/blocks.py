"""Kernels in the blocks of GGUF files, as panels of the same blocks: nothing is rounded again."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.arch import LlamaConfig
from medusa_jax.cpu.library import library
from medusa_jax.cpu.panels import FORMS, Panels, in_panels
from medusa_jax.model.blocks import BlockRows
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params

# Linear maps that `prepare` makes one of.
FUSED = {
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}


def prepare(
    config: LlamaConfig, part: Params, blocks: Params, place: Any, storage: Storage
) -> Params:
    """`Engine.prepare`: an entry whose kernels are `BlockRows`, these as panels of the same blocks, fused."""
    [name] = part
    packed = partial(pack, activations=storage.activations)
    if name == "embed_tokens":
        rows = blocks["embedding"]
        packs_rows = packs(rows.blocks.kind, rows.inputs)
        panels = packed([rows]) if packs_rows or config.tie_embeddings else None
        embedding = panels if packs_rows else jnp.asarray(rows.blocks.unpacked(slice(None)))
        # A tied LM head is the same panels.
        head = {"lm_head": {"kernel": panels}} if config.tie_embeddings else {}
        return {name: {"embedding": embedding}, **head}
    if name == "lm_head":
        return {name: {"kernel": packed([blocks["kernel"]])}}
    [placed] = place().values()
    for group, fused in FUSED.items():
        for linear, names in fused.items():
            kernels = [blocks[group][each]["kernel"] for each in names]
            placed[group].setdefault(linear, {})["kernel"] = packed(kernels)
    return {name: placed}


def pack(kernels: Sequence[BlockRows], activations: int) -> Panels:
    """Kernels of the same inputs side by side, in their blocks; other types in float32.

    Raises: `Blocks.damaged`.
    """
    words, parts = [], []
    for kind, group in itertools.groupby(kernels, lambda k: k.blocks.kind):
        alike = list(group)
        inputs, form = alike[0].inputs, kind
        if packs(kind, inputs):
            found = pack_blocks(kind, _stacked([k.blocks.rows() for k in alike]), inputs)
            if found is None:
                raise alike[0].blocks.damaged
        else:
            native, form = library(), "float32"
            assert native is not None
            rows = _stacked([k.blocks.unpacked(slice(None)) for k in alike])
            found = np.asarray(in_panels(jnp.asarray(rows.T), native.panel)).ravel()
        words.append(found)
        parts.append((form, sum(k.outputs for k in alike)))
    words_on_device = jax.device_put(_stacked(words))
    return Panels(words_on_device, None, tuple(parts), kernels[0].inputs, activations)


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def packs(kind: str, inputs: int) -> bool:
    """Whether rows of this many inputs in blocks of this type have panels."""
    native = library()
    form = FORMS.get(kind, 0)
    return native is not None and native.call("medusa_packed_words", form, 1, inputs) > 0


def pack_blocks(kind: str, rows: np.ndarray, inputs: int) -> np.ndarray | None:
    """Rows of blocks [outputs, bytes] as words of panels; None if a scale is not finite.

    A row of blocks holds all weights of one output.
    """
    native, (outputs, size), form = library(), rows.shape, FORMS[kind]
    assert native is not None and rows.dtype == np.uint8
    n_words = native.call("medusa_packed_words", form, outputs, inputs)
    rows, words = np.ascontiguousarray(rows), np.zeros(n_words, np.uint32)
    at, to = rows.ctypes.data, words.ctypes.data
    return (
        words if native.call("medusa_pack", form, at, size, outputs, inputs, to) else None
    )
