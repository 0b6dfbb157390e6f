"""Kernels in the blocks of GGUF files, as panels of the same blocks: nothing is rounded again."""

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.arch import LlamaConfig
from medusa_jax.cpu.panels import FORMS, Panels, in_panels
from medusa_jax.model.blocks import Blocks
from medusa_jax.native import loaded
from medusa_jax.sharding import Params, PyTree


def read_blocks(
    config: LlamaConfig, name: str, blocks: Params, others: Params, activations: int
) -> Params:
    """`Kernels.read_blocks`: panels of the same blocks, or, for embeddings of other types, float32."""
    if name != "embed_tokens":
        return {name: _packed(blocks, others, activations)}
    rows: Blocks = blocks["embedding"]
    native = packs(rows.kind, rows.inputs)
    panels = pack(rows, activations) if native or config.tie_embeddings else None
    embedding = panels if native else jnp.asarray(rows.unpacked(slice(None)))
    # A tied LM head is the same panels.
    head = {"lm_head": {"kernel": panels}} if config.tie_embeddings else {}
    return {name: {"embedding": embedding}, **head}


def _packed(blocks: PyTree, others: Params, activations: int) -> PyTree:
    if isinstance(blocks, Blocks):
        return pack(blocks, activations)
    packed = {k: _packed(v, others.get(k, {}), activations) for k, v in blocks.items()}
    return {**others, **packed}


def pack(blocks: Blocks, activations: int) -> Panels:
    """Pack a kernel in its own blocks, or in float32 if blocks of its type have no panels.

    Raises:
      UserError: a scale is not finite.
    """
    kind, inputs = blocks.kind, blocks.inputs
    words = None
    if packs(kind, inputs):
        rows = blocks.rows()
        words = pack_blocks(kind, rows, inputs)
    if words is not None:
        stored = jax.device_put(words)
    else:  # `unpacked` refuses scales that are not finite
        kind, rows = "float32", blocks.unpacked(slice(None))
        stored = in_panels(jnp.asarray(rows.T), loaded().panel)
    return Panels(stored, None, kind, inputs, len(rows), activations)


def packs(kind: str, inputs: int) -> bool:
    """Whether rows of this many inputs in blocks of this type have panels."""
    return loaded().call("medusa_packed_words", FORMS.get(kind, 0), 1, inputs) > 0


def pack_blocks(kind: str, rows: np.ndarray, inputs: int) -> np.ndarray | None:
    """Rows of blocks [outputs, bytes] as words of panels; None if a scale is not finite.

    A row of blocks holds all weights of one output.
    """
    (outputs, size), form = rows.shape, FORMS[kind]
    assert rows.dtype == np.uint8
    n_words = loaded().call("medusa_packed_words", form, outputs, inputs)
    rows, words = np.ascontiguousarray(rows), np.zeros(n_words, np.uint32)
    is_packed = loaded().call(
        "medusa_pack", form, rows.ctypes.data, size, outputs, inputs, words.ctypes.data
    )
    return words if is_packed else None
