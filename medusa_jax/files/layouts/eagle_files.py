"""EAGLE-1 heads in their authors' layout: read (recognised by their keys) and written.

  fc.weight, fc.bias                                  [D, 2 D]: embedding first; some have no bias
  layers.{j}.self_attn.*, mlp.*, *_layernorm.weight   as in a Llama model; layer 0 has no input_layernorm
  embed_tokens.weight                                 the backbone's, refused if it is another

`pytorch_model.bin` or `model.safetensors` with a Llama's `config.json`. The depth of trees is not limited: the
same layers draft all depths.
"""

from dataclasses import replace

import numpy as np

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.files.hf_config import ROPE, check_like_llama, read_config
from medusa_jax.files.hf_keys import HARMLESS
from medusa_jax.files.hf_keys import locate as locate_in_llama
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.files.layouts.layout import (
    VLLM_COMMAND,
    Export,
    HeadFiles,
    Layout,
    without_factor,
)
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.tensor import Tensors
from medusa_jax.heads.eagle import Eagle, EagleConfig
from medusa_jax.whole_files import Json

EMBEDDING_COPY = "embed_tokens.weight"
# Fields that the layers depend on and that tensors do not show.
_LAYER_FIELDS = ("n_heads", "n_kv_heads", *ROPE)


class EagleFiles(Layout):
    """The authors' `pytorch_model.bin` and `config.json`."""

    name = "eagle"
    drafters = ("eagle",)
    loading = "`EaModel.from_pretrained` of the authors' code, as its `ea_model_path`"

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """The layout has no key for an LM head."""
        if heads.lm_head == "shared":
            return ""
        return f"EAGLE-1 heads score by the model's LM head, these have LM head {heads.lm_head!r}"

    def fits(self, tensors: Tensors) -> bool:
        return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= tensors.keys()

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads.

        Raises:
          UserError: no configuration of a Llama.
        """
        llama = read_config(files.directory)
        check_like_llama(files.directory, llama)
        return StoredHeads(
            source=files.source,
            directory=files.directory,
            layout="EAGLE-1 heads",
            heads=EagleConfig(
                n_layers=llama.n_layers,
                fc_bias="fc.bias" in files.tensors,
                d_ff=llama.d_ff,
                rms_eps=llama.rms_eps,
            ),
            tensors=files.tensors,
            locate=locate_in_layers,
            ignore=ignore,
            meta=files.config,
            layers={name: getattr(llama, name) for name in _LAYER_FIELDS},
            copied_embedding=EMBEDDING_COPY,
        )

    def write(self, export: Export, out: str) -> None:
        """Write them with a copy of the backbone's embedding."""
        arrays, config = _arrays_and_config(export)
        config["bias"] = "fc.bias" in arrays
        export.write(out, "pytorch_model.bin", arrays, config)


class EagleForSGLang(EagleFiles):
    """`model.safetensors`. SGLang adds a bias after `fc`, random if the file has none."""

    name = "sglang"
    loading = "`--speculative-algorithm EAGLE --speculative-draft-model-path {out}`"

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """SGLang runs the layers as a Llama's or a Qwen2's."""
        reason = super().why_not(heads, llama) or _unknown_layers("sglang", llama)
        return reason or without_factor("sglang", llama)

    def write(self, export: Export, out: str) -> None:
        """Write them with SGLang's `architectures`, and zeros for a bias after fc that they lack."""
        arrays, config = _arrays_and_config(export)
        arrays.setdefault("fc.bias", np.zeros(arrays["fc.weight"].shape[0], export.kind))
        config["architectures"] = [f"{name}Eagle" for name in config["architectures"]]
        export.write(out, "model.safetensors", arrays, config)


class EagleForVLLM(EagleFiles):
    """`model.safetensors`. vLLM has no bias after `fc`."""

    name = "vllm"
    loading = VLLM_COMMAND

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """vLLM runs the layers as a Llama's, and fc without a bias."""
        assert isinstance(heads, EagleConfig)
        reason = super().why_not(heads, llama)
        if not reason and heads.fc_bias:
            return "vLLM drops the bias after EAGLE's fc without a warning: train with heads.fc_bias=False"
        reason = reason or _unknown_layers("vllm", llama)
        if not reason and llama is not None and llama.qkv_bias:
            return "vLLM's EAGLE-1 has the layers of a Llama, these have q/k/v biases: --to sglang"
        return reason

    def write(self, export: Export, out: str) -> None:
        """Write them without `bias`, the field of a bias after fc."""
        export.write(out, "model.safetensors", *_arrays_and_config(export))


def ignore(key: str) -> bool:
    """Whether a key is the copy of the backbone's embedding, or a table that every version recomputes."""
    return key == EMBEDDING_COPY or bool(HARMLESS.search(key))


def locate_in_layers(path: str) -> tuple[str, bool]:
    """A path of layers that draft all depths -> (key, whether it is stored transposed)."""
    key, transposed = locate_in_llama(path.removeprefix("heads_0/"))
    return key.removeprefix("model."), transposed


def _unknown_layers(engine: str, llama: LlamaConfig | None) -> str:
    """Why an engine has no layers like the backbone's; "" if it may have."""
    if llama is None or not (llama.qk_norm or llama.mlp_bias or llama.out_bias):
        return ""
    return f"{engine}'s EAGLE-1 has layers without q/k norms and biases of outputs or MLPs"


def _arrays_and_config(export: Export) -> tuple[Arrays, Json]:
    """Tensors and config.json. The layers attend to the whole text."""
    arrays = export.arrays(locate_in_layers) | {EMBEDDING_COPY: export.embedding()}
    heads = export.stored.heads
    assert isinstance(heads, EagleConfig)
    shape = Eagle(heads, export.base.config.llama_layers()).shape
    config = replace(shape, n_layers=heads.n_layers)
    return arrays, config_to_hf(config)
