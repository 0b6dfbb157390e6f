"""DFlash and DSpark heads as z-lab, SpecForge and DeepSpec write them, recognised by their keys.

  fc.weight                                [D, A D] for A streams, lowest first; hidden_norm.weight, norm.weight
  layers.{j}.*                             as in a Qwen3 model
  markov_head.markov_{w1,w2}.weight        [V, R] each (DSpark); early SpecForge has `logit_head.` before them
  confidence_head.proj.{weight,bias}       [1, D + R], [1]; without W1 of the token before in its input [1, D], not read
  embed_tokens.weight                      the backbone's, refused if it is another
  lm_head.weight                           [O, D], if the heads have one of their own, or a copy of the backbone's
  d2t [O] int64, t2d [V] bool              a draft vocabulary, as in `tapped_files.py` (speculators)

`config.json`: see `dflash_config.py`.
"""

import re
from dataclasses import replace
from typing import ClassVar

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf_config import LAYER_KINDS, check_like_llama, parse_config
from medusa_jax.files.hf_keys import LM_HEAD
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.files.layouts import dflash_config, speculators_config
from medusa_jax.files.layouts.eagle_files import EMBEDDING_COPY, ignore, locate_in_layers
from medusa_jax.files.layouts.layout import (
    VLLM_COMMAND,
    Export,
    HeadFiles,
    Layout,
    without_factor,
)
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.layouts.tapped_files import (
    out_of_order,
    shape_of,
    shared_lm_head,
    take_ids,
    verifier,
    vocabulary_arrays,
)
from medusa_jax.files.tensor import Tensors, rename
from medusa_jax.heads.dflash import DFlash, DFlashConfig, DSparkConfig
from medusa_jax.heads.tapped import numbers
from medusa_jax.whole_files import Json

_CONFIDENCE = "confidence_head.proj.weight"
_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_UNREAD = {_CONFIDENCE, "confidence_head.proj.bias"}


class DFlashFiles(Layout):
    """`model.safetensors` and `config.json` of z-lab and SpecForge, which vLLM and SGLang read."""

    name = "dflash"
    drafters: ClassVar[tuple[str, ...]] = ("dflash", "dspark")
    loading = (
        f"vLLM: {VLLM_COMMAND}; SGLang: "
        "`--speculative-algorithm {DRAFTER} --speculative-draft-model-path {out}`; DeepSpec, if the "
        "root's slot guesses, and it alone without a Markov head: "
        "`eval.py --draft_name_or_path {out} --target_name_or_path {base}`"
    )
    # DeepSpec draws embedding and LM head at random if a file lacks them.
    copies: ClassVar[bool] = True

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """DFlash or DSpark as published, with the backbone's LM head."""
        assert isinstance(heads, DFlashConfig)
        if heads.draft_vocab:
            return f"--to dflash scores all tokens, not the {heads.draft_vocab} of heads.draft_vocab"
        if heads.lm_head != "shared":
            return f"--to dflash scores by the model's LM head, not by {heads.lm_head!r}"
        if heads.markov_rank and not heads.root_guesses:
            return (
                "--to dflash cannot say that DSpark's root does not guess: --to speculators"
            )
        if heads.window and heads.window_at_root:
            return "--to dflash counts windows from each slot, these are from the root: --to speculators"
        return out_of_order(heads, llama) or without_factor("vLLM, by --to dflash,", llama)

    def fits(self, tensors: Tensors) -> bool:
        keys = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"}
        return keys <= tensors.keys()

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads, those of speculators too.

        Raises:
          UserError: missing or unsupported fields.
        """
        source, file, config = files.source, files.config_file, files.config
        tensors = rename(files.tensors, lambda key: key.removeprefix("logit_head."))
        config_fields = dflash_config.read(file, config)
        values = config_fields.values
        # What slots see is of the heads (`dflash_config.sight`), not of the layers' family.
        seen = ("is_causal", "layer_types")
        shape_alone = {k: x for k, x in values.items() if k not in seen}
        layer = parse_config(file, shape_alone | {"use_sliding_window": False})
        check_like_llama(file, layer)
        if not layer.qk_norm:
            raise UserError(
                f"{file}: layers of {config.get('model_type')} are not supported"
            )
        shape, sizes = shape_of(layer)
        rank = config_fields.count("markov_rank", 0, least=0)
        dflash = values.get("projector_type") == "dflash"
        if bool(rank) != (_W1 in tensors) or (rank and dflash):
            raise UserError(
                f"{file}: markov_rank {rank} or projector_type contradicts the keys of {source}"
            )
        kind = DSparkConfig if rank else DFlashConfig
        taps = dflash_config.tapped(config_fields, layer.n_layers)
        root_guesses = dflash_config.root_guesses(config_fields, rank)
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
        block_size = config_fields.count("block_size", least=1 if root_guesses else 2)
        heads = kind(
            n_heads=block_size if root_guesses else block_size - 1,
            lm_head="own" if LM_HEAD in tensors else "shared",
            mask_token=config_fields.count("mask_token_id", least=0),
            tap_layers=",".join(str(i + 1) for i in taps),
            **sizes,
            markov_rank=rank,
            root_guesses=root_guesses,
            draft_vocab=0 if ids is None else len(ids),
            confidence=confidence,
            **dflash_config.sight(config_fields, layer.n_layers),
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
            copied_lm_heads=(LM_HEAD,),
            copied_embedding=EMBEDDING_COPY,
        )

    def write(self, export: Export, out: str) -> None:
        """Write in the form of z-lab and SpecForge; where the root's slot guesses, of DeepSpec."""
        drafter, layers, markov = _description(export)
        heads, config = drafter.heads, export.base.config
        table: Json = {
            "mask_token_id": heads.mask_token % config.vocab_size,
            dflash_config.TAPS: [tap - 1 for tap in drafter.taps],
        }
        arrays, name = export.arrays(_locate), "DFlashDraftModel"
        if heads.root_guesses:
            # DeepSpec and SGLang read these next to the layers' fields, DeepSpec also its number of anchors.
            markov |= table | {"num_anchors": 512}
            table = {"projector_type": "dspark"} | markov
            arrays |= _copies(export) if self.copies else {}
            name = "Qwen3DSparkModel"
        if heads.causal != "sliding":
            layers["is_causal"] = heads.causal == "all"
        raw = layers | markov | {
            "architectures": [name],
            "block_size": drafter.n_slots,
            "num_target_layers": config.n_layers,
            dflash_config.TABLE: table,
        }  # fmt: skip
        export.write(out, "model.safetensors", arrays, raw)


class SpeculatorsDFlash(DFlashFiles):
    """`model.safetensors` and `config.json` of speculators, which vLLM reads, too."""

    name = "speculators"
    draft_vocab = True
    loading = speculators_config.LOADING

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """Any but low-rank LM heads, windows from each slot and causal layers without a window."""
        assert isinstance(heads, DFlashConfig)
        if heads.lm_head == "low_rank":
            return "--to speculators cannot store low-rank LM heads"
        if heads.causal == "all" or (heads.window and not heads.window_at_root):
            return "in speculators only layers with a window from the root are causal: --to dflash"
        return out_of_order(heads, llama)

    def write(self, export: Export, out: str) -> None:
        """Write them with the backbone's embedding and a copy of a shared LM head."""
        drafter, layers, markov = _description(export)
        heads, vocab_size = drafter.heads, export.base.config.vocab_size
        fields = markov | {
            "draft_vocab_size": heads.draft_vocab or vocab_size,
            "block_size": drafter.n_slots,
            "mask_token_id": heads.mask_token % vocab_size,
            "sample_from_anchor": heads.root_guesses,
            "sliding_window_non_causal": heads.causal == "none",
            dflash_config.INPUTS: list(drafter.taps),
        }
        raw = speculators_config.write(
            kind="dspark" if markov else "dflash",
            architecture="DSparkSpeculator" if markov else "DFlashSpeculator",
            layers=layers,
            fields=fields,
            tokens=drafter.n_heads,
            verifier=verifier(export),
        )
        # speculators computes with NaN where a file has no embedding and LM head.
        arrays = export.arrays(_locate) | vocabulary_arrays(export) | _copies(export)
        export.write(out, "model.safetensors", arrays, raw)


def _copies(export: Export) -> Arrays:
    """The backbone's embedding, and its LM head if the heads share it."""
    return {EMBEDDING_COPY: export.embedding()} | shared_lm_head(export)


def _locate(path: str) -> tuple[str, bool]:
    """A path of `heads/dflash.py` -> (key, whether it is stored transposed)."""
    key, transposed = locate_in_layers(path)
    key = re.sub(r"^(markov_w\d)\b", r"markov_head.\1", key)
    return re.sub(r"^confidence\b", "confidence_head.proj", key), transposed


def _description(export: Export) -> tuple[DFlash, Json, Json]:
    """The heads, config.json of their layers, fields of the Markov and confidence heads."""
    heads, config = export.stored.heads, export.base.config
    assert isinstance(heads, DFlashConfig)
    drafter = DFlash(heads, config.llama_layers())
    shape = replace(drafter.shape, n_layers=heads.n_layers, tie_embeddings=False)
    layers = config_to_hf(shape) | {"model_type": "qwen3"}
    if heads.window:
        sliding = numbers(heads.sliding_layers)
        kinds = [LAYER_KINDS[j in sliding] for j in range(heads.n_layers)]
        layers |= {"layer_types": kinds, "sliding_window": heads.window}
        layers["use_sliding_window"] = True
    if not heads.root_guesses and not heads.markov_rank:
        return drafter, layers, {}
    # DSpark of rank 0 is DFlash whose root guesses.
    markov: Json = {"markov_rank": heads.markov_rank}
    markov["enable_confidence_head"] = heads.confidence
    if heads.markov_rank:
        markov["markov_head_type"] = "vanilla"
    if heads.confidence:
        markov["confidence_head_with_markov"] = True
    return drafter, layers, markov
