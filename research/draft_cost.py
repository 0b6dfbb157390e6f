"""`python -m research draft_cost`: the cost of drafting relative to one pass of the backbone.

Decoding is bound by memory bandwidth, so the cost of a step is the bytes that it reads. For every
drafter, `commit` and `propose` are compiled for a published model shape without weights. The table
gives their bytes by XLA's cost analysis as a share of one backbone pass over the same tree, and the
share for the weights only, the least that must be read.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from medusa_jax.api.weightless import trained_shapes
from medusa_jax.commands.flags import Program, flag
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.console import announced, use_compilation_cache
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import Cell, table_of
from medusa_jax.files.shapes import SHAPES
from medusa_jax.heads.amphista import AmphistaAlphaConfig, AmphistaConfig
from medusa_jax.heads.drafter import Backbone, Committed, DraftRequest, Ranked
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.heads.hydrapp import HydraPPConfig
from medusa_jax.heads.registry import make_drafter
from medusa_jax.heads.vocabulary import stand_in
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.cache import KVCache
from medusa_jax.model.llama import Llama, decoding_config, init_params
from medusa_jax.model.placing import prepare
from medusa_jax.sharding import PyTree
from medusa_jax.training.dry import count, stored_bytes
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json
from research.layers import extrapolated

# (nodes, parents) per depth of the 64-node tree in the figures of Medusa, Hydra and Amphista. Only
# Hydra's cost depends on the number of parents.
LEVELS = ((10, 1), (28, 10), (23, 10), (2, 1))
# The drafters to compare, in the papers' settings.
DRAFTERS = {
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
COLUMNS: dict[str, Cell] = {
    "drafter": "{drafter}",
    "parameters": lambda r: f"{r['parameters'] / 1e9:.2f} B",
    "propose + commit, of one backbone pass": "{share:.1%}",
    "weights alone": "{weights_share:.1%}",
}
EXAMPLES = """examples:
  python -m research draft_cost
  python -m research draft_cost --shape llama-33b --json
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Bytes read by drafting, as a share of one backbone pass."""

    shape: str = flag("shape of a published model", "llama-7b", choices=sorted(SHAPES))
    slots: int = flag("cache slots, text and tree", 512)
    draft_vocab: int = flag("tokens that heads score, 0: all", 0)
    json: bool = flag("one JSON object instead of a table", False)


def paper_tree() -> Tree:
    """A tree with `LEVELS` nodes per depth: 64 with the root, four deep."""
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


def _accessed(function: Callable[..., PyTree], *shapes: PyTree) -> float:
    """Bytes that the compiled function reads and writes, by XLA's cost analysis."""
    analysis = jax.jit(function).lower(*shapes).compile().cost_analysis()
    if not analysis or "bytes accessed" not in analysis:
        raise UserError("this backend does not report the cost of a compiled program")
    return float(analysis["bytes accessed"])


def pass_cost(config: LlamaConfig, tree: Tree, slots: int) -> dict[str, float]:
    """Bytes of one backbone pass over the tree by the cost analysis, and of its weights.

    The embedding table is only looked up and does not count as weights.
    """
    kernels = choose_kernels()
    llama = Llama(decoding_config(config), jnp.float32, shards=1, kernels=kernels)

    def run(
        params: PyTree, cache: KVCache, tokens_1M: jax.Array, start_1: jax.Array
    ) -> PyTree:
        backbone = Backbone(llama, params)
        positions_1M = start_1[:, None] + jnp.asarray(tree.depth_M)[None]
        mask_MM = jnp.asarray(tree.mask_MM)
        hidden, cache = backbone.decode(tokens_1M, positions_1M, cache, start_1, mask_MM)
        return backbone.lm_head(hidden), cache

    trained = trained_shapes(config)["backbone"]
    params = jax.eval_shape(lambda params: prepare(params, config, jnp.float32), trained)
    sizes = (config.n_layers, 1, slots, config.n_kv_heads, config.head_dim)
    cache = jax.eval_shape(lambda: KVCache.zeros(*sizes, jnp.float32))
    ids = jax.ShapeDtypeStruct((1, tree.n_nodes), jnp.int32)
    start = jax.ShapeDtypeStruct((1,), jnp.int32)
    read = stored_bytes({k: v for k, v in params.items() if k != "embed_tokens"})
    return {"bytes": _accessed(run, params, cache, ids, start), "weights": read}


def backbone_cost(arch: LlamaConfig, tree: Tree, slots: int) -> dict[str, float]:
    """`pass_cost` without compiling all layers."""

    def of_layers(n: int) -> Json:
        return pass_cost(dataclasses.replace(arch, n_layers=n), tree, slots)

    return extrapolated(of_layers, arch.n_layers, (1, 2))


def draft_bytes(
    heads: HeadsConfig, arch: LlamaConfig, tree: Tree, slots: int
) -> tuple[float, float, int]:
    """Return (bytes of commit + propose by the cost analysis, bytes of its weights, parameters)."""
    config = dataclasses.replace(arch, n_layers=0)
    drafter = make_drafter(heads, config)
    llama = Llama(config, kernels=choose_kernels())
    L, D = tree.path_length, arch.d_model

    def init(key: jax.Array) -> tuple[PyTree, Backbone]:
        narrow = stand_in(Backbone(llama, init_params(config, key)), heads)
        return drafter.init(key, narrow), narrow

    def run(params: PyTree, backbone: Backbone, state: PyTree, new: Committed) -> PyTree:
        state = drafter.commit(params, backbone, state, new)
        request = DraftRequest(new.tokens_BT[:, 0], tree, lambda depth, x: Ranked(x, x))
        return state, drafter.propose(params, backbone, state, request).nodes_BM

    params, backbone = jax.eval_shape(init, jax.random.key(0))
    state = jax.eval_shape(lambda: drafter.start(1, slots, jnp.float32))

    def newly_accepted() -> Committed:
        ids = jnp.zeros((1, L), jnp.int32)
        return Committed(jnp.zeros((1, L, D)), ids, ids, ids, ids[:, 0])

    new = jax.eval_shape(newly_accepted)
    total = _accessed(run, params, backbone, state, new)
    return total, float(stored_bytes(params)), count(params)


def measure(
    shape: str, slots: int, names: Sequence[str] = tuple(DRAFTERS), draft_vocab: int = 0
) -> Json:
    """Costs of the named drafters on a published shape.

    Compiled in float32, which all backends count the same way; the shares hold for any type.
    """
    arch, tree = SHAPES[shape], paper_tree()
    if slots < tree.n_nodes:
        raise UserError(f"--slots {slots} does not hold a tree of {tree.n_nodes} nodes")
    rows = []
    with announced("compiling one backbone pass"):
        whole = backbone_cost(arch, tree, slots)
    for name in names:
        heads = dataclasses.replace(DRAFTERS[name], draft_vocab=draft_vocab)
        with announced(f"compiling {name}"):
            cost, read, parameters = draft_bytes(heads, arch, tree, slots)
        row = {"drafter": name, "parameters": parameters, "bytes": cost}
        shares = {"share": cost / whole["bytes"], "weights_share": read / whole["weights"]}
        rows.append(row | shares)
    return {
        "shape": shape,
        "tree_nodes": tree.n_nodes,
        "slots": slots,
        "draft_vocab": draft_vocab,
        "backbone_bytes": whole["bytes"],
        "backbone_weight_bytes": whole["weights"],
        "rows": rows,
    }


def run(flags: Flags) -> int:
    """Measure and print."""
    use_compilation_cache()
    found = measure(flags.shape, flags.slots, draft_vocab=flags.draft_vocab)
    if flags.json:
        print(json.dumps(found))
        return 0
    print(table_of(found["rows"], COLUMNS))
    print(
        f"\nbackbone pass: {found['backbone_bytes'] / 1e9:.1f} GB in float32, of which weights "
        f"{found['backbone_weight_bytes'] / 1e9:.1f} GB ({found['shape']}, "
        f"{found['tree_nodes']} nodes, {found['slots']} cache slots)"
    )
    return 0


main = Program("python -m research draft_cost", Flags, run, EXAMPLES)
