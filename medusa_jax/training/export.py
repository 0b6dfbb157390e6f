"""Export the result of a run: heads, or a backbone with heads and tokenizer."""

import os

import jax

from medusa_jax.arch import LlamaConfig
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.layouts import native_heads
from medusa_jax.heads import vocabulary
from medusa_jax.hosts import first
from medusa_jax.model.lora import merge
from medusa_jax.model.quantise import dequantise_backbone
from medusa_jax.sharding import PyTree
from medusa_jax.text.tokenizer_files import copy_tokenizer
from medusa_jax.training.models import Setup
from medusa_jax.training.plan import RunPlan
from medusa_jax.whole_files import Json, write_json


def export(
    directory: str, plan: RunPlan, setup: Setup, params: PyTree, recipe: Json
) -> None:
    """Write the result of a run to `directory`.

    A trained backbone becomes a Hugging Face directory, with its heads in `heads/` inside it;
    adapters are merged into it. Heads of a frozen backbone are in the directory itself. Every
    process must call this; process 0 writes.
    """
    ids: Json = {}
    heads_directory, base = directory, setup.base
    trained = trained_backbone(plan, setup, params)
    if trained is not None:
        arch, backbone = trained
        base = native_heads.base_record(arch, fingerprint(arch, backbone))
        dtype = jax.tree.leaves(backbone)[0].dtype
        if first():
            ids = copy_tokenizer(plan.model.tokenizer, plan.model.path, directory)
        save_backbone(directory, arch, backbone, dtype, ids)
        if first():
            write_json(os.path.join(directory, "recipe.json"), recipe)
        heads_directory = os.path.join(directory, "heads")
    if "heads" in params:
        assert base is not None
        draft_ids = {k: setup.frozen[k] for k in (vocabulary.GROUP,) if k in setup.frozen}
        heads_params = params["heads"] | draft_ids
        native_heads.save_heads(
            heads_directory, plan.heads, heads_params, base=base, recipe=recipe
        )


def trained_backbone(
    plan: RunPlan, setup: Setup, params: PyTree
) -> tuple[LlamaConfig, PyTree] | None:
    """The trained backbone for export; None if the run did not change it.

    Adapters are merged in float32 into the (dequantised) backbone that they were trained on, then stored in
    the type of the frozen backbone.
    """
    if "backbone" in params:
        return plan.arch, params["backbone"]
    if "lora" not in params:
        return None
    original = dequantise_backbone(setup.frozen["backbone"])
    arch, merged = merge(plan.arch, original, params["lora"], plan.lora)
    return arch, jax.tree.map(lambda x: x.astype(plan.model.param_dtype), merged)
