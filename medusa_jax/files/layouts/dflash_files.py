"""DFlash and DSpark heads as z-lab, SpecForge and DeepSpec write them, recognised by their keys.

  fc.weight                                [D, A D] for A streams, lowest first; hidden_norm.weight, norm.weight
  layers.{j}.*                             as in a Qwen3 model
  markov_head.markov_{w1,w2}.weight        [V, R] each (DSpark)
  confidence_head.proj.{weight,bias}       [1, D + R], [1]; without W1 of the token before in its input [1, D], not read
  embed_tokens.weight                      a copy of the backbone's, not read
  lm_head.weight                           [O, D], if the heads have one of their own
  d2t [O] int64, t2d [V] bool              a draft vocabulary, as in `tapped_files.py` (speculators)

`config.json` describes the layers. `block_size`, `mask_token_id`, `target_layer_ids` and the fields of the Markov
head are there, in its table `dflash_config`, or in both. Layers are numbered from 0 by their outputs (-1: the
embedding), one less than in `heads.tap_layers`. A block of DSpark has `block_size` guesses, one of DFlash
a guess less, since its first slot is the root's. speculators has the layers' fields in a table
(`speculators_config.py`), numbers layers by their inputs, and says `sample_from_anchor` where the root's slot guesses.
"""

import re
from dataclasses import replace

from medusa_jax.errors import UserError
from medusa_jax.files.hf_config import parse_config
from medusa_jax.files.hf_keys import LM_HEAD
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.files.layouts import speculators_config
from medusa_jax.files.layouts.eagle_files import EMBEDDING_COPY, ignore, locate_in_layers
from medusa_jax.files.layouts.layout import Export, HeadFiles, Layout
from medusa_jax.files.layouts.stored_heads import StoredHeads
from medusa_jax.files.layouts.tapped_files import (
    shape_of,
    take_ids,
    verifier,
    vocabulary_arrays,
)
from medusa_jax.files.tensor import Tensors
from medusa_jax.heads.dflash import DFlash, DFlashConfig, DSparkConfig
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json

_CONFIDENCE = "confidence_head.proj.weight"
_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_UNREAD = {_CONFIDENCE, "confidence_head.proj.bias"}
_TABLE, _TAPS = "dflash_config", "target_layer_ids"
# The tapped layers of speculators, and its other fields that are read here.
_INPUTS = "aux_hidden_state_layer_ids"
SPECULATORS_FIELDS = {
    "block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
}  # fmt: skip
# Values that the computation here has; others would change it.
EXPECTED = {
    "projector_type": ("dflash", "dspark"), "markov_head_type": ("vanilla",),
    "attention_mode": ("gqa",), "attention_bias": (False,), "use_sliding_window": (False,),
    "input_embedding_scale": (1, 1.0), "output_multiplier": (1, 1.0),
    "final_logit_softcapping": (0, 0.0), "causal": (False,), "is_causal": (False,),
}  # fmt: skip


class DFlashFiles(Layout):
    """`model.safetensors` and `config.json` of z-lab and SpecForge, which vLLM and SGLang read."""

    name = "dflash"
    loading = (
        'vLLM: `speculative_config={{"method": "{drafter}", "model": "{out}", '
        '"num_speculative_tokens": {heads}}}`; SGLang: `--speculative-algorithm {DRAFTER} '
        "--speculative-draft-model-path {out}`"
    )

    def fits(self, tensors: Tensors) -> bool:
        keys = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"}
        return keys <= tensors.keys()

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads, those of speculators too.

        Raises:
          UserError: missing or unsupported fields.
        """
        source, tensors = files.source, files.tensors
        file, config = files.config_file, files.config
        if speculators_config.TYPE in config:
            values = _of_speculators(file, config)
        else:
            table = Fields(file, config).table(_TABLE)
            for name in config.keys() & table.keys():
                if config[name] != table[name]:
                    raise UserError(
                        f"{file}: {name} is {config[name]!r}, and {table[name]!r} in {_TABLE}"
                    )
            values = config | table
        values = {k: x for k, x in values.items() if x is not None}
        config_fields, layer = Fields(file, values), parse_config(file, values)
        config_fields.expect(EXPECTED)
        if not layer.qk_norm:
            raise UserError(
                f"{file}: layers of {config.get('model_type')} are not supported"
            )
        shape, sizes = shape_of(config_fields, layer)
        dspark = _W1 in tensors
        if dspark != (values.get("projector_type", "dspark" if dspark else "") == "dspark"):
            raise UserError(f"{file}: projector_type contradicts the keys of {source}")
        kind = DSparkConfig if dspark else DFlashConfig
        taps = config_fields.items(_TAPS, int)
        if sorted(set(taps)) != taps or min(taps, default=-2) < -1:
            raise UserError(
                f"{file}: {_TAPS} should be ascending numbers from -1 on, not {taps}"
            )
        root_guesses = dspark
        if "sample_from_anchor" in values:
            root_guesses = config_fields.switch("sample_from_anchor")
        # Without inputs next to the slot's output the confidence is not read.
        confidence = (
            _CONFIDENCE in tensors and sum(tensors[_CONFIDENCE].shape[1:]) > layer.d_model
        )
        ids = take_ids(source, tensors, layer.vocab_size, (LM_HEAD, _W2))
        outputs = layer.vocab_size if ids is None else len(ids)
        size = values.get("draft_vocab_size") or outputs
        if size != outputs:
            raise UserError(
                f"{file}: draft_vocab_size {size!r}, {source} has {outputs} tokens"
            )
        block_size = config_fields.count("block_size", least=2)
        heads = kind(
            n_heads=block_size if root_guesses else block_size - 1,
            lm_head="own" if LM_HEAD in tensors else "shared",
            mask_token=config_fields.count("mask_token_id", least=0),
            tap_layers=",".join(str(i + 1) for i in taps),
            **sizes,
            markov_rank=config_fields.count("markov_rank") if dspark else 0,
            root_guesses=root_guesses,
            draft_vocab=0 if ids is None else len(ids),
            confidence=confidence,
        )
        depth = values.get("num_target_layers")
        shape |= {"vocab_size": layer.vocab_size} | ({"n_layers": depth} if depth else {})

        def unread(key: str) -> bool:
            return ignore(key) or (not confidence and key in _UNREAD)

        return StoredHeads(
            source=source,
            directory=files.directory,
            layout=f"{kind.__name__.removesuffix('Config')} heads",
            heads=heads,
            tensors=tensors,
            locate=_locate,
            ignore=unread,
            meta=config,
            layers=shape,
            ids=ids,
        )

    def write(self, export: Export, out: str) -> None:
        """Write in the form of z-lab and SpecForge."""
        drafter, layers, markov = _description(export)
        heads, config = drafter.heads, export.base.config
        table: Json = {
            "mask_token_id": heads.mask_token % config.vocab_size,
            _TAPS: [tap - 1 for tap in drafter.taps],
        }
        if markov:
            # DeepSpec and SGLang read these next to the layers' fields, DeepSpec also its number of anchors.
            markov |= table | {"num_anchors": 512}
            table = {"projector_type": "dspark"} | markov
        name = "Qwen3DSparkModel" if heads.markov_rank else "DFlashDraftModel"
        raw = layers | markov | {
            "architectures": [name],
            "block_size": drafter.n_slots,
            "num_target_layers": config.n_layers,
            "torch_dtype": export.kind.name,
            _TABLE: table,
        }  # fmt: skip
        export.write(out, "model.safetensors", export.arrays(_locate), raw)


class SpeculatorsDFlash(DFlashFiles):
    """`model.safetensors` and `config.json` of speculators, which vLLM reads, too."""

    name = "speculators"
    loading = speculators_config.LOADING

    def write(self, export: Export, out: str) -> None:
        """Write them with the backbone's embedding and a copy of a shared LM head."""
        drafter, layers, markov = _description(export)
        heads, vocab_size = drafter.heads, export.base.config.vocab_size
        fields = markov | {
            "draft_vocab_size": heads.draft_vocab or vocab_size,
            "block_size": drafter.n_slots,
            "mask_token_id": heads.mask_token % vocab_size,
            "sample_from_anchor": heads.root_guesses,
            "sliding_window_non_causal": False,
            "torch_dtype": export.kind.name,
        }
        raw = speculators_config.write(
            kind="dspark" if markov else "dflash",
            architecture="DSparkSpeculator" if markov else "DFlashSpeculator",
            layers=layers,
            fields=fields,
            taps={_INPUTS: list(drafter.taps)},
            tokens=drafter.n_heads,
            verifier=verifier(export),
        )
        # speculators computes with NaN where a file has neither of these.
        copies = {EMBEDDING_COPY: export.embedding()}
        if heads.lm_head == "shared":
            lm_head_VD, ids = export.base.lm_head().T.astype(export.kind), export.stored.ids
            copies[LM_HEAD] = lm_head_VD if ids is None else lm_head_VD[ids]
        arrays = export.arrays(_locate) | vocabulary_arrays(export) | copies
        export.write(out, "model.safetensors", arrays, raw)


def _of_speculators(file: str, config: Json) -> Json:
    """The fields that z-lab's form has; layers by their outputs."""
    kinds = ("dflash", "dspark")
    values, taps = speculators_config.read(file, config, kinds, SPECULATORS_FIELDS, _INPUTS)
    if (width := values.get("target_hidden_size")) not in (None, values.get("hidden_size")):
        raise UserError(
            f"{file}: target_hidden_size {width!r} is not the layers' hidden_size"
        )
    if taps:
        values[_TAPS] = [i - 1 for i in taps]
    dspark = config[speculators_config.TYPE] == "dspark"
    values.setdefault("sample_from_anchor", dspark)
    rank = values.setdefault("markov_rank", 256 if dspark else 0)
    return values | {"projector_type": "dspark" if rank else "dflash"}


def _locate(path: str) -> tuple[str, bool]:
    """A path of `heads/dflash.py` -> (key, whether it is stored transposed)."""
    key, transposed = locate_in_layers(path)
    key = re.sub(r"^(markov_w\d)\b", r"markov_head.\1", key)
    return re.sub(r"^confidence\b", "confidence_head.proj", key), transposed


def _description(export: Export) -> tuple[DFlash, Json, Json]:
    """The heads, config.json of their layers, fields of the Markov and confidence heads."""
    heads, config = export.stored.heads, export.base.config
    assert isinstance(heads, DFlashConfig)
    drafter = DFlash(heads, config)
    shape = replace(
        drafter.shape, n_layers=heads.n_layers, sliding_window=0, tie_embeddings=False
    )
    layers = config_to_hf(shape) | {"model_type": "qwen3"}
    if not heads.markov_rank:
        return drafter, layers, {}
    markov = {"markov_rank": heads.markov_rank, "markov_head_type": "vanilla"}
    markov |= {"enable_confidence_head": heads.confidence}
    return (
        drafter,
        layers,
        markov | ({"confidence_head_with_markov": True} if heads.confidence else {}),
    )
