"""Decoding with a tree equals plain decoding on this device, on tiny random models of one drafter."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.api.weightless import random_backbone, random_heads
from medusa_jax.config import LlamaConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.heads import drafter_class, make_drafter
from medusa_jax.interop.tokenizer import NoTokenizer
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import make_mesh
from medusa_jax.tree import Tree
from research.hardware.record import Record

# Few tokens, so that random heads guess right at times.
CONFIG = LlamaConfig(vocab_size=16, d_model=128, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=32,
                     d_ff=256, max_position=1024)  # fmt: skip
PROMPTS = (3, 17, 40)
OPTIONS = {
    "greedy": Options(temperature=0.0),
    "sampled": Options(temperature=0.9, top_p=0.95, seed=3),
}


def run(record: Record, drafter: str) -> None:
    """float64 must be equal, through caches that grow; float32 and bfloat16 are counted."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in PROMPTS]
    # Room for 128 tokens, then 256, in a minute of compilation; other types begin with as many as needed.
    slots = {"float64": 64 if record.small else 128}
    kinds = ("float64", "float32", "bfloat16")
    for kind in kinds[:1] if record.small else kinds:
        loop.MIN_SLOTS = loop.ACCELERATOR_SLOTS = slots.get(kind, 256)
        model = tiny(drafter, jnp.dtype(kind))
        for name in OPTIONS:
            if record.left() < 5:
                record.row("out of time", drafter=drafter, kind=kind)
                return
            with record.trying("exact", drafter=drafter, kind=kind, sampling=name):
                compare(record, model, prompts, name)


def compare(record: Record, model: Model, prompts: Sequence[list[int]], name: str) -> None:
    """A batch with and without drafts, and one of its rows alone."""
    options = replace(OPTIONS[name], max_new_tokens=40 if record.small else 150)
    plain = model.generate(prompts, options, tree=Tree.none())
    drafted = model.generate(prompts, options)
    facts: dict[str, object] = {"drafter": model.drafter.name, "kind": str(model.dtype)}
    facts |= {
        "sampling": name,
        "equal": sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted)),
        "texts": len(prompts),
        "steps": [sum(r.steps for r in runs) for runs in (plain, drafted)],
    }
    if name == "greedy":
        [alone] = model.generate(prompts[1:2], options)
        facts["alone_equals_in_batch"] = alone.token_ids == drafted[1].token_ids
    record.row("exact", **facts)


def tiny(name: str, dtype: np.dtype) -> Model:
    """A random model with random heads and a tree of 16 nodes."""
    mesh, storage = make_mesh((1, 1, 1)), Storage()
    drafter = make_drafter(drafter_class(name).Config(drafter=name, n_heads=3), CONFIG)
    variables = {
        "backbone": random_backbone(CONFIG, dtype, storage, mesh),
        "heads": random_heads(drafter, dtype, storage),
    }
    tree = Tree.cartesian([3, 2, 1])
    return Model(
        CONFIG, variables, NoTokenizer("tiny"), drafter, dtype=dtype, mesh=mesh, storage=storage, tree=tree, eos_ids=()
    )  # fmt: skip
