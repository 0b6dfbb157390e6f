"""Step latency on this device for a model of a given shape, with random weights.

Times are of whole steps (draft, verify, accept, commit, append); runs of each drafter are
interleaved with plain decoding. Trees are the first nodes of the growth order of the demo's Hydra
heads: random heads have no ranks to grow a tree from, and latency depends on the shape of the tree,
not on how many drafts are accepted.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import DEMO, Model
from medusa_jax.api.weightless import abstract_state, random_backbone, random_heads
from medusa_jax.config import LlamaConfig
from medusa_jax.console import announced
from medusa_jax.decoding.generate import decode_loop
from medusa_jax.decoding.timing import engine_seconds
from medusa_jax.evaluate.bandwidth import bytes_per_token, read_bandwidth
from medusa_jax.heads import drafter_class, make_drafter
from medusa_jax.interop.tokenizer import NoTokenizer
from medusa_jax.model.forms import choose_storage
from medusa_jax.sharding import make_mesh
from medusa_jax.tree import Tree, load_tree_file
from medusa_jax.tree.files import tree_of_size

SIZES = (8, 16, 32, 64)
GROWTH = DEMO / "hydra" / "tree.json"
# The depth of the trees: the papers' trees of 64 nodes are four deep, and so is this growth order.
N_HEADS = 4
# Tokens in the cache when steps are timed.
PROMPT = 64


def measure(
    config: LlamaConfig,
    names: Sequence[str],
    *,
    dtype: str,
    weights: str | None = None,
    draft_weights: str | None = None,
    rounds: int = 7,
) -> dict[str, Any]:
    """Figures of plain decoding and one row for each drafter, all on one backbone.

    Args:
      names: drafters.
      weights, draft_weights: what kernels are stored in, as for `load`.
    """
    number, mesh = jnp.dtype(dtype), make_mesh((1, 1, 1))
    storage = choose_storage(config, number, mesh, weights, draft_weights)
    growth = load_tree_file(GROWTH)["growth"]
    trees = [tree_of_size(growth, size) for size in SIZES]
    drafters = [
        make_drafter(drafter_class(n).Config(drafter=n, n_heads=N_HEADS), config)
        for n in names
    ]
    with announced("making random weights"):
        backbone = random_backbone(config, number, storage, mesh)

    def model_of(drafter: Any) -> Model:
        heads = random_heads(drafter, number, storage)
        variables = {"backbone": backbone, "heads": heads}
        stand_in = NoTokenizer("a shape")
        return Model(
            config, variables, stand_in, drafter, dtype=number, mesh=mesh, storage=storage,
            tree=trees[-1], eos_ids=(),
        )  # fmt: skip

    rows, plain, model = [], [], None
    for name, drafter in zip(names, drafters):
        model = None  # frees the previous heads
        model = model_of(drafter)
        with announced(f"timing {name}"):
            row = drafter_row(model, trees, rounds)
        plain.append(row.pop("plain"))
        rows.append({"drafter": name} | row)
    assert model is not None
    needed = bytes_per_token(model, PROMPT)
    bandwidth = read_bandwidth(needed)
    seconds = float(np.median([p["step_seconds"] for p in plain]))
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "dtype": dtype,
        "weights": storage.weights or dtype,
        "products": model.products,
        "sizes": list(SIZES),
        "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(backbone)),
        "read_bandwidth_bytes_per_second": bandwidth,
        "plain": {
            "step_seconds": seconds,
            "bytes_needed": needed,
            "bandwidth_share": needed / seconds / bandwidth,
            "host_share": float(np.median([p["host_share"] for p in plain])),
            "read_against_needed": read_against_needed(model, Tree.none()),
        },
        "drafters": rows,
        "peak_bytes": memory.get("peak_bytes_in_use"),
    }


def drafter_row(model: Model, trees: Sequence[Tree], rounds: int) -> dict[str, Any]:
    """Latency of steps with these trees against plain ones; also dispatched one by one, for the
    plain step and the last tree's."""
    engines = [model.engine(Tree.none()), *(model.engine(tree) for tree in trees)]
    apart = [engines[0], engines[-1]]
    *together, plain_apart, last_apart = engine_seconds(
        [*engines, *apart], model.variables, [1] * PROMPT, rounds=rounds,
        one_by_one=[False] * len(engines) + [True] * len(apart),
    )  # fmt: skip
    plain, last = together[0], together[-1]
    return {
        "head_bytes": head_bytes(model),
        "step_latency_ratios": [seconds / plain for seconds in together[1:]],
        "step_seconds": last,
        "host_share": 1 - last / last_apart,
        "read_against_needed": read_against_needed(model, trees[-1]),
        "plain": {"step_seconds": plain, "host_share": 1 - plain / plain_apart},
    }


def head_bytes(model: Model) -> int:
    """Bytes of the heads' parameters."""
    return sum(x.nbytes for x in jax.tree.leaves(model.variables["heads"]))


def read_against_needed(model: Model, tree: Tree) -> float | None:
    """Bytes that the compiled step accesses by XLA's cost analysis, over the bytes that it needs.

    Needed are one read of the backbone's weights, of the cache and, if there are drafts, of the
    heads' weights. XLA counts the body of the step loop once. None if the backend has no cost
    analysis.
    """
    engine = model.engine(tree)
    state = abstract_state(engine, model.variables, PROMPT)
    lowered = decode_loop.lower(engine, model.variables, state, np.int32(1))
    counted = (lowered.compile().cost_analysis() or {}).get("bytes accessed")
    needed = bytes_per_token(model, state.cache.slots)
    needed += head_bytes(model) if tree.depth else 0
    return None if counted is None else float(counted) / needed
