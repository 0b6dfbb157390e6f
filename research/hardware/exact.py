"""Decoding with a tree equals plain decoding on this device, on tiny random models of one drafter."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.api.loaded_drafter import LoadedDrafter
from medusa_jax.api.tree_choice import TreeChoice
from medusa_jax.config import LlamaConfig
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.sharding import make_mesh
from medusa_jax.text.tokenizer import NoTokenizer
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json
from research.hardware.record import Record
from research.weights import plain_form, random_backbone, random_heads

# Few tokens, so that random heads guess right at times.
CONFIG = LlamaConfig(vocab_size=16, d_model=128, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=32,
                     d_ff=256, max_position=1024)  # fmt: skip
PROMPTS = (3, 17, 40)
# Slots for a prompt and its answer.
LENGTH = 256
OPTIONS = {
    "greedy": Options(temperature=0.0),
    "sampled": Options(temperature=0.9, top_p=0.95, seed=3),
}


def run(record: Record, drafter: str) -> None:
    """float64 must be equal, through a cache that grows; float32 and bfloat16 are counted."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in PROMPTS]
    kinds = ("float64",) if record.small else ("float64", "float32", "bfloat16")
    models = {kind: tiny(drafter, jnp.dtype(kind)) for kind in kinds}
    for name, part in (("batches", compare), ("rows alone", alone)):
        for kind, sampling in itertools.product(kinds, OPTIONS):
            if record.left() < 5:
                record.row("out of time", drafter=drafter, kind=kind)
                return
            # Every size of the cache is a program to compile.
            grows = (name, kind, sampling) == ("batches", "float64", "greedy")
            kernels = type(models[kind].llama.kernels)
            kernels.least_slots = LENGTH // 2 if grows else LENGTH
            options = replace(OPTIONS[sampling], max_new_tokens=LENGTH - max(PROMPTS) - 20)
            facts = {"drafter": drafter, "kind": kind, "sampling": sampling}
            with record.trying("exact", **facts):
                figures = part(models[kind], prompts, options)
                record.row("exact", of=name, **facts, **figures)


def compare(model: Model, prompts: Sequence[list[int]], options: Options) -> Json:
    """A batch with drafts and without."""
    plain = model.generate(prompts, options, tree=Tree.none())
    drafted = model.generate(prompts, options)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted))
    steps = [sum(r.steps for r in runs) for runs in (plain, drafted)]
    return {"equal": equal, "texts": len(prompts), "steps": steps}


def alone(model: Model, prompts: Sequence[list[int]], options: Options) -> Json:
    """A row of a batch and the same text alone, both with drafts."""
    rows = model.generate(prompts[:1], options), model.generate(prompts, options)
    equal = int(rows[0][0].token_ids == rows[1][0].token_ids)
    return {"equal": equal, "texts": 1, "steps": [texts[0].steps for texts in rows[::-1]]}


def tiny(name: str, dtype: np.dtype) -> Model:
    """A random model with random heads and a tree of 16 nodes."""
    mesh = make_mesh((1, 1, 1))
    form = plain_form(dtype, mesh, CONFIG.head_dim)
    drafter = make_drafter(drafter_class(name).Config(drafter=name, n_heads=3), CONFIG)
    backbone = random_backbone(CONFIG, dtype, form.storage, mesh)
    loaded = LoadedDrafter(drafter, random_heads(drafter, dtype, form.storage))
    trees = TreeChoice(Tree.cartesian([3, 2, 1]))
    return Model(
        CONFIG, backbone, loaded, NoTokenizer("tiny"), form, mesh, trees, eos_ids=()
    )
