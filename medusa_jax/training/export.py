"""Export the result of a training run: heads, or a backbone with its heads and tokenizer."""

import os

import jax
import jax.numpy as jnp

from medusa_jax.config import Config, LlamaConfig
from medusa_jax.heads import vocabulary
from medusa_jax.hosts import first
from medusa_jax.interop import hf, own_heads
from medusa_jax.interop.tokenizer_files import copy_tokenizer
from medusa_jax.model import lora
from medusa_jax.model.quantise import dequantise_backbone
from medusa_jax.sharding import PyTree
from medusa_jax.training.setup import Setup
from medusa_jax.whole_files import Json, write_json


def result(cfg: Config, setup: Setup, params: PyTree, name: str, recipe: Json) -> None:
    """Write `<workdir>/<name>/`.

    A trained backbone becomes a Hugging Face directory, with its heads in `heads/` inside it;
    adapters are merged into it. Heads of a frozen backbone are in the directory itself. Every
    process must call this; process 0 writes.
    """
    write, ids = first(), {}
    directory = os.path.join(cfg.workdir, name)
    heads_directory, base = directory, setup.base
    trained = trained_backbone(cfg, setup, params)
    if trained is not None:
        arch, backbone = trained
        base = own_heads.base_record(arch, hf.fingerprint(arch, backbone))
        dtype = jax.tree.leaves(backbone)[0].dtype
        if write:
            ids = copy_tokenizer(cfg.model.tokenizer, cfg.model.path, directory)
        hf.save_backbone(directory, arch, backbone, dtype, ids, write)
        if write:
            write_json(os.path.join(directory, "recipe.json"), recipe)
        heads_directory = os.path.join(directory, "heads")
    if "heads" in params:
        assert base is not None
        chosen = {k: setup.frozen[k] for k in (vocabulary.GROUP,) if k in setup.frozen}
        heads = params["heads"] | chosen
        own_heads.save_heads(
            heads_directory, cfg.heads, heads, base=base, recipe=recipe, write=write
        )


def trained_backbone(
    cfg: Config, setup: Setup, params: PyTree
) -> tuple[LlamaConfig, PyTree] | None:
    """The trained backbone for export; None if the run did not change it.

    Adapters are merged in float32 into the (dequantised) backbone that they were trained on, then stored in
    the type of the frozen backbone.
    """
    if "backbone" in params:
        return setup.arch, params["backbone"]
    if "lora" not in params:
        return None
    original = dequantise_backbone(setup.frozen["backbone"])
    arch, merged = lora.merge(setup.arch, original, params["lora"], cfg.lora)
    dtype = jnp.dtype(cfg.model.param_dtype)
    return arch, jax.tree.map(lambda x: x.astype(dtype), merged)
