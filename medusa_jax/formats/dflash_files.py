"""DFlash and DSpark heads as z-lab, SpecForge and DeepSpec write them, recognised by their keys.

  fc.weight                                [D, A D] for A streams, lowest first; hidden_norm.weight, norm.weight
  layers.{j}.*                             as in a Qwen3 model
  markov_head.markov_{w1,w2}.weight        [V, R] each (DSpark)
  confidence_head.proj.{weight,bias}       not read: it changes how many tokens an engine drafts, not which
  embed_tokens.weight                      a copy of the backbone's, not read
  lm_head.weight                           [V, D], if the heads have one of their own

`config.json` describes the layers. `block_size`, `mask_token_id`, `target_layer_ids` and the fields of the Markov
head are there, in its table `dflash_config`, or in both. Layers are numbered from 0 by their outputs (-1: the
embedding), one less than in `heads.tap_layers`. A block of DSpark has `block_size` guesses, one of DFlash
a guess less, since its first slot is the root's.
"""

import os
from dataclasses import replace

from medusa_jax.errors import UserError
from medusa_jax.formats.eagle3_files import shape_of
from medusa_jax.formats.export import Export
from medusa_jax.heads.dflash import DFlash, DFlashConfig, DSparkConfig
from medusa_jax.interop.fields import Fields
from medusa_jax.interop.hf import HARMLESS
from medusa_jax.interop.hf import locate as locate_in_llama
from medusa_jax.interop.hf_config import parse_config
from medusa_jax.interop.hf_writer import config_to_hf
from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.interop.tensor import Tensors
from medusa_jax.whole_files import Json

_LM_HEAD, _W1 = "lm_head.weight", "markov_head.markov_w1.weight"
_TABLE, _TAPS = "dflash_config", "target_layer_ids"
# Values that the computation here has; others would change it.
EXPECTED = {
    "projector_type": ("dflash", "dspark"), "markov_head_type": ("vanilla",),
    "attention_mode": ("gqa",), "attention_bias": (False,), "use_sliding_window": (False,),
    "input_embedding_scale": (1, 1.0), "output_multiplier": (1, 1.0),
    "final_logit_softcapping": (0, 0.0), "causal": (False,), "is_causal": (False,),
}  # fmt: skip


def fits(tensors: Tensors) -> bool:
    """Whether a file holds DFlash or DSpark heads."""
    return {
        "fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight",
    } <= tensors.keys()  # fmt: skip


def open_heads(source: str, directory: str, tensors: Tensors, config: Json) -> StoredHeads:
    """Describe the heads of a file.

    Args: as for `medusa_files.open_heads`.

    Raises:
      UserError: missing or unsupported fields.
    """
    file = os.path.join(directory, "config.json")
    table = Fields(file, config).table(_TABLE)
    for name in config.keys() & table.keys():
        if config[name] != table[name]:
            raise UserError(
                f"{file}: {name} is {config[name]!r}, and {table[name]!r} in {_TABLE}"
            )
    values = {k: x for k, x in (config | table).items() if x is not None}
    for name, able in EXPECTED.items():
        if name in values and values[name] not in able:
            raise UserError(
                f"{file}: {name} {values[name]!r} is not supported (only {able[0]!r})"
            )
    if "sliding_attention" in values.get("layer_types", ()):
        raise UserError(f"{file}: heads with sliding attention are not supported")
    given, layer = Fields(file, values), parse_config(file, config)
    if not layer.qk_norm:
        raise UserError(f"{file}: layers of {config.get('model_type')} are not supported")
    shape, sizes = shape_of(layer)
    dspark = _W1 in tensors
    if dspark != (values.get("projector_type", "dspark" if dspark else "") == "dspark"):
        raise UserError(f"{file}: projector_type contradicts the keys of {source}")
    kind = DSparkConfig if dspark else DFlashConfig
    taps = given.items(_TAPS, int)
    if sorted(set(taps)) != taps or min(taps, default=-2) < -1:
        raise UserError(
            f"{file}: {_TAPS} should be ascending numbers from -1 on, not {taps}"
        )
    heads = kind(
        n_heads=given.count("block_size", least=2) - (not dspark),
        lm_head="own" if _LM_HEAD in tensors else "shared",
        mask_token=given.count("mask_token_id", least=0),
        tap_layers=",".join(str(i + 1) for i in taps),
        **sizes,
        markov_rank=given.count("markov_rank") if dspark else 0,
    )
    depth = values.get("num_target_layers")
    shape |= {"vocab_size": layer.vocab_size} | ({"n_layers": depth} if depth else {})

    def ignore(key: str) -> bool:
        unread = key.startswith(("confidence_head.", "embed_tokens."))
        return unread or bool(HARMLESS.search(key))

    return StoredHeads(
        source=source, directory=directory, layout=f"{kind.__name__.removesuffix('Config')} heads",
        heads=heads, tensors=tensors, locate=locate, ignore=ignore, meta=config, layers=shape,
    )  # fmt: skip


def locate(path: str) -> tuple[str, bool]:
    """A path of `heads/dflash.py` -> (key, whether it is stored transposed)."""
    name = path.removeprefix("heads_0/")
    if name.startswith("markov_"):
        part, leaf = name.split("/")
        return f"markov_head.{part}.weight", leaf == "kernel"
    key, transposed = locate_in_llama(name)
    return key.removeprefix("model."), transposed


def to_dflash(export: Export, out: str) -> None:
    """Write the layout of z-lab and SpecForge, which vLLM and SGLang read: `model.safetensors`."""
    heads, config = export.stored.heads, export.base.config
    assert isinstance(heads, DFlashConfig)
    drafter = DFlash(heads, config)
    shape = replace(
        drafter.shape, n_layers=heads.n_layers, sliding_window=0, tie_embeddings=False
    )
    layers = config_to_hf(shape)
    table = {
        "mask_token_id": heads.mask_token % config.vocab_size,
        _TAPS: [tap - 1 for tap in drafter.taps],
    }
    markov = {}
    if heads.markov_rank:
        markov = {"markov_rank": heads.markov_rank, "markov_head_type": "vanilla"}
        markov |= {"enable_confidence_head": False}
        # DeepSpec and SGLang read these next to the layers' fields, DeepSpec also its number of anchors.
        markov |= table | {"num_anchors": 512}
        table = {"projector_type": "dspark"} | markov
    name = "Qwen3DSparkModel" if heads.markov_rank else "DFlashDraftModel"
    raw = layers | markov | {
        "architectures": [name],
        "model_type": "qwen3",
        "block_size": drafter.n_slots,
        "num_target_layers": config.n_layers,
        "torch_dtype": export.kind.name,
        _TABLE: table,
    }  # fmt: skip
    export.write(out, "model.safetensors", export.arrays(locate), raw)
