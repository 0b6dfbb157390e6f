"""What files of EAGLE-3, DFlash and DSpark heads share: layers of their sizes, and a draft vocabulary.

d2t [O] int64       token id - place among the O
t2d [V] bool        which of V tokens they are, if there
"""

import os
from collections.abc import Sequence

import numpy as np

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf_config import ROPE
from medusa_jax.files.hf_keys import LM_HEAD
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.files.json_files import optional_json
from medusa_jax.files.layouts.layout import Export
from medusa_jax.files.layouts.stored_heads import Arrays
from medusa_jax.files.tensor import Tensors, read_whole, take_rows
from medusa_jax.heads.registry import make_drafter
from medusa_jax.heads.tapped import TappedConfig, TappedDrafter, numbers
from medusa_jax.whole_files import Json

_D2T, _T2D = "d2t", "t2d"


def drafter_of(heads: HeadsConfig, llama: LlamaConfig) -> TappedDrafter:
    """The drafter of EAGLE-3, DFlash or DSpark heads.

    Raises:
      UserError: as `make_drafter`.
    """
    drafter = make_drafter(heads, llama)
    assert isinstance(drafter, TappedDrafter)
    return drafter


def out_of_order(heads: TappedConfig, llama: LlamaConfig | None) -> str:
    """The reason why vLLM, which sorts tapped layers, misreads these; "" if it does not."""
    taps = [*(drafter_of(heads, llama).taps if llama else numbers(heads.tap_layers))]
    if taps == sorted({*taps}):
        return ""
    return f"the layout's engine vLLM reads each tapped layer once, in order, not {taps}"


def shape_of(layer: LlamaConfig) -> tuple[Json, Json]:
    """Required fields of the backbone's shape, and the fields of the heads with the layer's sizes.

    A `rope_theta` of 0 is the backbone's rotation.
    """
    shape: Json = {"d_model": layer.d_model}
    sizes: Json = {
        "n_layers": layer.n_layers,
        "attention_heads": layer.n_heads,
        "kv_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim,
        "d_ff": layer.d_ff,
        "rope_theta": layer.rope_theta,
        "rms_eps": layer.rms_eps,
    }
    if layer.rope_scaling not in ("none", "dynamic"):
        shape |= {name: getattr(layer, name) for name in ROPE}
        sizes["rope_theta"] = 0.0
    return shape, sizes


def take_ids(
    source: str, tensors: Tensors, vocab_size: int, keys: Sequence[str]
) -> np.ndarray | None:
    """Remove the draft vocabulary, which is not a parameter, from the tensors of a file.

    Its tokens become ascending, and with them the rows of the tensors of these keys.
    """
    offsets, member = tensors.pop(_D2T, None), tensors.pop(_T2D, None)
    if offsets is None and member is None:
        return None
    if offsets is None:
        raise UserError(f"key {_D2T!r} is missing from {source}, which has {_T2D!r}")
    offset_O = read_whole(offsets)
    kind = offset_O.dtype.name
    # Larger numbers of a 16-bit type are rounded.
    most = {"bfloat16": 2**8, "float16": 2**11}.get(kind, 2**31)
    offset_O = offset_O.astype(np.float64)
    wrong = offset_O[(offset_O != np.rint(offset_O)) | (np.abs(offset_O) > most)]
    if offset_O.ndim != 1 or not offset_O.size or wrong.size:
        found = f"{kind}{list(offset_O.shape)}" + (
            f" with {wrong[0]}" if wrong.size else ""
        )
        raise UserError(
            f"key {_D2T!r} in {source} should be whole numbers [tokens] (token id - place), not {found}"
        )
    ids = np.arange(len(offset_O)) + offset_O.astype(np.int64)
    order = np.argsort(ids)
    ids = ids[order]
    member_V = np.isin(np.arange(vocab_size), ids) if member is None else read_whole(member)
    if member_V.shape != (vocab_size,) or not np.array_equal(np.flatnonzero(member_V), ids):
        raise UserError(
            f"keys {_D2T!r} and {_T2D!r} in {source} name different tokens, or some twice or none of the "
            f"{vocab_size}"
        )
    if not np.array_equal(order, np.arange(len(order))):
        fitting = [k for k in keys if k in tensors and tensors[k].shape[:1] == order.shape]
        tensors.update({k: take_rows(tensors[k], order) for k in fitting})
    return None if len(ids) == vocab_size else ids.astype(np.int32)


def vocabulary_arrays(export: Export) -> Arrays:
    """The draft vocabulary, if there is one."""
    if (ids := export.stored.ids) is None:
        return {}
    member_V = np.isin(np.arange(export.base.config.vocab_size), ids)
    return {_D2T: ids.astype(np.int64) - np.arange(len(ids)), _T2D: member_V}


def shared_lm_head(export: Export) -> Arrays:
    """The backbone's LM head [O, D] for heads that share it, since engines look for their own."""
    if export.stored.heads.lm_head != "shared":
        return {}
    return {LM_HEAD: export.lm_head(export.stored.ids).T}


def architectures(export: Export) -> list[str]:
    """The model's class in its config.json; if it names none, the class of the first family with its shape."""
    said = optional_json(os.path.join(export.base.source, "config.json"))
    return said.get("architectures") or config_to_hf(export.base.config)["architectures"]


def verifier(export: Export) -> Json:
    """The backbone, as speculators names it."""
    return {"name_or_path": export.base_name, "architectures": architectures(export)}
