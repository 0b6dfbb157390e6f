"""`python -m research draft_cost`: the cost of drafting relative to one pass of the backbone.

Decoding is bound by memory bandwidth, so the cost of a step is the bytes that it reads. For every
drafter, `commit` and `propose` are compiled for a published model shape without weights. The table
gives their bytes by XLA's cost analysis as a share of one backbone pass over the same tree, and the
share for the weights only, the least that must be read.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from medusa_jax.commands.flags import command, run_command
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.heads.drafter import DraftRequest
from medusa_jax.interop.shapes import SHAPES

# (nodes, parents) per depth of the 64-node tree in the figures of Medusa, Hydra and Amphista. Only
# Hydra's cost depends on the number of parents.
LEVELS = ((10, 1), (28, 10), (23, 10), (2, 1))
EXAMPLES = """examples:
  python -m research draft_cost
  python -m research draft_cost --shape llama-33b --json
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `draft_cost`."""

    shape: str
    slots: int
    draft_vocab: int
    json: bool


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m research draft_cost",
        "Bytes read by drafting, as a share of one backbone pass.",
        EXAMPLES,
    )
    p.add_argument("--shape", choices=sorted(SHAPES), default="llama-7b")
    p.add_argument("--slots", type=int, default=512, help="cache slots, text and tree")
    p.add_argument(
        "--draft_vocab", type=int, default=0, help="tokens that heads score, 0: all"
    )
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return p


def paper_tree() -> Any:
    """A tree with `LEVELS` nodes per depth: 64 with the root, four deep."""
    from medusa_jax.tree import Tree

    choices: list[list[int]] = []
    above: list[list[int]] = [[]]
    for n_nodes, n_parents in LEVELS:
        # As even as possible: the first parents get one child more.
        counts = [
            n_nodes // n_parents + (i < n_nodes % n_parents) for i in range(n_parents)
        ]
        level = [[*above[i], r] for i, n in enumerate(counts) for r in range(n)]
        choices, above = choices + level, level
    return Tree.from_choices(choices)


def drafters() -> dict[str, Any]:
    """The drafters to compare, in the papers' settings."""
    from medusa_jax.config import HeadsConfig
    from medusa_jax.heads.amphista import AmphistaAlphaConfig, AmphistaConfig
    from medusa_jax.heads.eagle import EagleConfig
    from medusa_jax.heads.hydra import HydraConfig
    from medusa_jax.heads.hydrapp import HydraPPConfig

    return {
        "medusa": HeadsConfig(n_heads=4),
        "hydra": HydraConfig(),
        "hydra++ (layers tied, as released)": HydraPPConfig(tie_layers=True),
        "hydra++": HydraPPConfig(),
        "amphista": AmphistaConfig(),
        "amphista, rank 256": AmphistaConfig(lm_head="low_rank", rank=256),
        "amphista-alpha": AmphistaAlphaConfig(),
        "amphista-alpha, rank 256": AmphistaAlphaConfig(lm_head="low_rank", rank=256),
        "eagle": EagleConfig(n_heads=4),
    }


def _bytes(function: Any, *shapes: Any) -> float:
    """Bytes that the compiled function reads and writes, by XLA's cost analysis."""
    import jax

    analysis = jax.jit(function).lower(*shapes).compile().cost_analysis()
    if not analysis or "bytes accessed" not in analysis:
        raise UserError("this backend does not report the cost of a compiled program")
    return float(analysis["bytes accessed"])


def _size(tree: Any) -> int:
    import jax

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def pass_cost(config: Any, tree: Any, slots: int) -> tuple[float, float]:
    """Return (bytes of one backbone pass over the tree by the cost analysis, bytes of its weights).

    The embedding table is only looked up and does not count as weights.
    """
    import jax
    import jax.numpy as jnp

    from medusa_jax.heads import Backbone
    from medusa_jax.model.cache import KVCache
    from medusa_jax.model.llama import Llama, decoding_config, init_params, prepare

    llama = Llama(decoding_config(config), jnp.float32, shards=1)

    def weights(key: jax.Array) -> Any:
        return prepare(init_params(config, key), config, jnp.float32)

    def run(params: Any, cache: Any, tokens_1M: Any, start_1: Any) -> Any:
        backbone = Backbone(llama, params)
        positions_1M = start_1[:, None] + jnp.asarray(tree.depth_M)[None]
        mask_MM = jnp.asarray(tree.mask_MM)
        hidden, cache = backbone.decode(tokens_1M, positions_1M, cache, start_1, mask_MM)
        return backbone.lm_head(hidden), cache

    params = jax.eval_shape(weights, jax.random.key(0))
    sizes = (config.n_layers, 1, slots, config.n_kv_heads, config.head_dim)
    cache = jax.eval_shape(lambda: KVCache.zeros(*sizes, jnp.float32))
    ids = jax.ShapeDtypeStruct((1, tree.n_nodes), jnp.int32)
    start = jax.ShapeDtypeStruct((1,), jnp.int32)
    read = _size({k: v for k, v in params.items() if k != "embed_tokens"})
    return _bytes(run, params, cache, ids, start), read


def backbone_cost(arch: Any, tree: Any, slots: int) -> tuple[float, float]:
    """`pass_cost` without compiling all layers.

    Layers are identical and unrolled, so L of them cost c(1) + (L - 1) (c(2) - c(1)).
    """
    costs = [pass_cost(dataclasses.replace(arch, n_layers=n), tree, slots) for n in (1, 2)]
    one, two = (
        one + (arch.n_layers - 1) * (two - one) for one, two in zip(*costs, strict=True)
    )
    return one, two


def draft_bytes(heads: Any, arch: Any, tree: Any, slots: int) -> tuple[float, float, int]:
    """Return (bytes of commit + propose by the cost analysis, bytes of its weights, parameters)."""
    import jax
    import jax.numpy as jnp

    from medusa_jax.heads import Backbone, make_drafter
    from medusa_jax.heads.drafter import Committed
    from medusa_jax.heads.vocabulary import stand_in
    from medusa_jax.model.llama import Llama, init_params

    config = dataclasses.replace(arch, n_layers=0)
    drafter, llama = make_drafter(heads, config), Llama(config)
    L, D = tree.path_length, arch.d_model

    def init(key: jax.Array) -> Any:
        backbone = init_params(config, key)
        narrow = stand_in(Backbone(llama, backbone), heads)
        return drafter.init(key, narrow), narrow

    def run(params: Any, backbone: Any, state: Any, hidden: Any, ids: Any, n: Any) -> Any:
        new = Committed(hidden, ids, ids, ids, n)
        state = drafter.commit(params, backbone, state, new)
        return state, drafter.propose(
            params,
            backbone,
            state,
            DraftRequest(ids[:, 0], tree, lambda depth, logits: logits),
        )

    params, backbone = jax.eval_shape(init, jax.random.key(0))
    state = jax.eval_shape(lambda: drafter.start(1, slots, jnp.float32))
    hidden = jax.ShapeDtypeStruct((1, L, D), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, L), jnp.int32)
    n = jax.ShapeDtypeStruct((1,), jnp.int32)
    total = _bytes(run, params, backbone, state, hidden, ids, n)
    count = sum(x.size for x in jax.tree.leaves(params))
    return total, float(_size(params)), count


def measure(
    shape: str, slots: int, names: Sequence[str] | None = None, draft_vocab: int = 0
) -> dict[str, Any]:
    """Costs of all drafters (or the named ones) on a published shape.

    Compiled in float32, which all backends count the same way; the shares hold for any type.
    """
    arch, tree = SHAPES[shape], paper_tree()
    if slots < tree.n_nodes:
        raise UserError(f"--slots {slots} does not hold a tree of {tree.n_nodes} nodes")
    rows = []
    with announced("compiling one backbone pass"):
        whole, whole_read = backbone_cost(arch, tree, slots)
    for name, heads in drafters().items():
        heads = dataclasses.replace(heads, draft_vocab=draft_vocab)
        if names is None or name in names:
            with announced(f"compiling {name}"):
                cost, read, parameters = draft_bytes(heads, arch, tree, slots)
            rows.append(
                {
                    "drafter": name,
                    "parameters": parameters,
                    "bytes": cost,
                    "share": cost / whole,
                    "weights_share": read / whole_read,
                }
            )
    return {
        "shape": shape,
        "tree_nodes": tree.n_nodes,
        "slots": slots,
        "draft_vocab": draft_vocab,
        "backbone_bytes": whole,
        "backbone_weight_bytes": whole_read,
        "rows": rows,
    }


def cost_table(found: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    header = (
        "drafter", "parameters", "propose + commit, of one backbone pass", "weights alone"
    )  # fmt: skip
    cells = [
        (
            r["drafter"],
            f"{r['parameters'] / 1e9:.2f} B",
            f"{100 * r['share']:.1f}%",
            f"{100 * r['weights_share']:.1f}%",
        )
        for r in found["rows"]
    ]
    return markdown_table(header, cells)


def run(flags: Flags) -> int:
    """Measure and print."""
    from medusa_jax.console import use_compilation_cache

    use_compilation_cache()
    found = measure(flags.shape, flags.slots, None, flags.draft_vocab)
    if flags.json:
        print(json.dumps(found))
        return 0
    print(cost_table(found))
    print(
        f"\nbackbone pass: {found['backbone_bytes'] / 1e9:.1f} GB in float32, of which weights "
        f"{found['backbone_weight_bytes'] / 1e9:.1f} GB ({found['shape']}, "
        f"{found['tree_nodes']} nodes, {found['slots']} cache slots)"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)


if __name__ == "__main__":
    sys.exit(main())
