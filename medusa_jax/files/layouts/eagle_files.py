"""EAGLE-1 heads in their authors' layout: read (recognised by their keys) and written.

  fc.weight, fc.bias                                  [D, 2 D]: embedding first; some have no bias
  layers.{j}.self_attn.*, mlp.*, *_layernorm.weight   as in a Llama model; layer 0 has no input_layernorm
  embed_tokens.weight                                 a copy of the backbone's, ignored

`pytorch_model.bin` or `model.safetensors` with a Llama's `config.json`. The depth of trees is not limited: the
same layers draft all depths.
"""

from dataclasses import replace

import numpy as np

from medusa_jax.files.hf import HARMLESS
from medusa_jax.files.hf import locate as locate_in_llama
from medusa_jax.files.hf_config import ROPE, read_config
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.files.layouts.export import Export
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.tensor import Tensors, rename
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.whole_files import Json

EMBEDDING = "embed_tokens.weight"
# Fields that the layers depend on and that tensors do not show.
_LAYER_FIELDS = ("n_heads", "n_kv_heads", "rms_eps", *ROPE)


def fits(tensors: Tensors) -> bool:
    """Whether a file holds EAGLE-1 heads in their authors' layout."""
    keys = {key.removeprefix("model.") for key in tensors}
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= keys


def open_heads(source: str, directory: str, tensors: Tensors, config: Json) -> StoredHeads:
    """Describe the EAGLE-1 heads of a file.

    Args: as for `medusa_files.open_heads`.

    Raises:
      UserError: no configuration of a Llama.
    """
    tensors = rename(tensors, lambda key: key.removeprefix("model."))
    llama = read_config(directory)
    heads = EagleConfig(n_layers=llama.n_layers, fc_bias="fc.bias" in tensors)
    layers = {name: getattr(llama, name) for name in _LAYER_FIELDS}
    return StoredHeads(
        source=source, directory=directory, layout="EAGLE-1 heads", heads=heads, tensors=tensors,
        locate=locate, ignore=ignore, meta=config, layers=layers,
    )  # fmt: skip


def ignore(key: str) -> bool:
    """Whether a key is the copy of the backbone's embedding, or a table that every version recomputes."""
    return key == EMBEDDING or bool(HARMLESS.search(key))


def locate(path: str) -> tuple[str, bool]:
    """A path of layers that draft all depths -> (key, whether it is stored transposed)."""
    key, transposed = locate_in_llama(path.removeprefix("heads_0/"))
    return key.removeprefix("model."), transposed


def to_eagle(export: Export, out: str) -> None:
    """Write the authors' `pytorch_model.bin`, with a copy of the backbone's embedding."""
    arrays, raw = _written(export)
    fields = {"bias": "fc.bias" in arrays, "torch_dtype": export.kind.name}
    export.write(out, "pytorch_model.bin", arrays, raw | fields)


def to_eagle_engine(export: Export, out: str, engine: str) -> None:
    """Write `model.safetensors` for vLLM's or SGLang's EAGLE-1.

    Both take a field `bias` for biases of the attention. SGLang always adds a bias after `fc`, random where the file
    has none, and knows the heads by `architectures`; vLLM has no such bias.
    """
    arrays, raw = _written(export)
    if engine == "sglang":
        arrays.setdefault("fc.bias", np.zeros(arrays["fc.weight"].shape[0], export.kind))
        raw["architectures"] = [f"{name}Eagle" for name in raw["architectures"]]
    raw["torch_dtype"] = export.kind.name
    export.write(out, "model.safetensors", arrays, raw)


def _written(export: Export) -> tuple[Arrays, Json]:
    """Tensors and config.json. The layers attend to the whole text."""
    arrays = export.arrays(locate) | {EMBEDDING: export.embedding()}
    n_layers = export.stored.heads.n_layers
    config = replace(export.base.config, n_layers=n_layers, sliding_window=0)
    return arrays, config_to_hf(config)
