"""`python -m research step_cost`: step latency on this device for a published shape, with random weights.

Times are of whole steps (draft, verify, accept, commit, append); runs of each drafter are
interleaved with plain decoding. Trees are the first nodes of the growth order of the demo's Hydra
heads: random heads have no ranks to grow a tree from, and latency depends on the shape of the tree,
not on how many drafts are accepted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import DEMO, Model, default_dtype
from medusa_jax.arch import DRAFT_WEIGHTS, DTYPES, WEIGHTS, LlamaConfig
from medusa_jax.commands.bench import out_directory
from medusa_jax.commands.flags import Program, at_least, flag
from medusa_jax.console import announced, entries
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import Cell, Row, device_facts, write_report
from medusa_jax.evaluate.weight_bytes import bytes_per_token
from medusa_jax.files.shapes import find_shape
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.placing import choose_storage
from medusa_jax.sharding import make_mesh
from medusa_jax.text.tokenizer import NoTokenizer
from medusa_jax.tree.files import load_tree_file, tree_of_size
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json, write_json
from research.bandwidth import read_bandwidth
from research.timed_steps import step_seconds
from research.weights import random_backbone, random_heads

SIZES = (8, 16, 32, 64)
GROWTH = DEMO / "hydra" / "tree.json"
# The depth of the trees: the papers' trees of 64 nodes are four deep, and so is this growth order.
N_HEADS = 4
# Tokens in the cache when steps are timed.
PROMPT = 64

EXAMPLES = """examples:
  python -m research step_cost --shape llama-7b
  python -m research step_cost --shape llama31-8b --drafters eagle3 --context 4000 --batch 8 --sizes 16,64
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Time steps of a published shape, or of a config.json, with random weights."""

    shape: str = flag("llama-7b, ..., or a directory")
    drafters: str | None = flag("comma-separated names (default: all)", None)
    dtype: str | None = flag("default: float32 on CPU, else bfloat16", None, choices=DTYPES)
    weights: str | None = flag("type to store kernels in", None, choices=WEIGHTS)
    draft_weights: str | None = flag("that of draft heads", None, choices=DRAFT_WEIGHTS)
    context: int = flag("tokens in the cache", PROMPT, type=at_least(1))
    batch: int = flag("rows of a step", 1, type=at_least(1))
    sizes: str = flag("comma-separated nodes of the trees", ",".join(map(str, SIZES)))
    repeats: int = flag("timed rounds", 3, type=at_least(1))
    out: str = flag("directory for results", "work/bench")


def measure(
    config: LlamaConfig,
    names: Sequence[str],
    *,
    dtype: str,
    weights: str | None = None,
    draft_weights: str | None = None,
    context: int = PROMPT,
    batch: int = 1,
    sizes: Sequence[int] = SIZES,
    rounds: int = 7,
) -> Iterator[Json]:
    """Figures of plain decoding and one row for each drafter, all on one backbone; after each drafter.

    Args:
      names: drafters.
      weights, draft_weights: types that kernels are stored in, as for `load`.
    """
    number, mesh = jnp.dtype(dtype), make_mesh((1, 1, 1))
    kernels = choose_kernels(mesh, number, config.head_dim)
    storage = choose_storage(kernels, number, mesh, weights, draft_weights)
    calibrated = load_tree_file(GROWTH)
    trees = [Tree.none(), *(tree_of_size(calibrated, size) for size in sizes)]
    drafters = [
        make_drafter(drafter_class(n).Config(drafter=n, n_heads=N_HEADS), config)
        for n in names
    ]
    with announced("making random weights"):
        backbone = random_backbone(config, number, storage, mesh, kernels)
    bandwidth = read_bandwidth(sum(x.nbytes for x in jax.tree.leaves(backbone)))
    rows, plain = [], []
    for name, drafter in zip(names, drafters):
        heads = random_heads(drafter, number, storage, kernels)
        model = Model(
            config, {"backbone": backbone, "heads": heads}, NoTokenizer("a shape"), drafter,
            dtype=number, mesh=mesh, storage=storage, kernels=kernels, tree=trees[-1],
            eos_ids=(),
        )  # fmt: skip
        with announced(f"timing {name}"):
            first, *others = step_seconds(
                model, trees, [1] * context, batch=batch, rounds=rounds
            )
        plain.append(first)
        rows.append({
            "drafter": name,
            "head_bytes": sum(x.nbytes for x in jax.tree.leaves(heads)),
            "step_latency_ratios": [seconds / first for seconds in others],
            "step_seconds": others[-1],
        })  # fmt: skip
        weight_bytes = bytes_per_token(model, 0)
        needed = weight_bytes + batch * (bytes_per_token(model, context) - weight_bytes)
        seconds = float(np.median(plain))
        yield {
            "dtype": dtype,
            "weights": storage.weights or dtype,
            "products": model.products,
            "context": context,
            "batch": batch,
            "sizes": list(sizes),
            "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(backbone)),
            "read_bandwidth_bytes_per_second": bandwidth,
            "plain": {
                "step_seconds": seconds,
                "bytes_needed": needed,
                "bandwidth_share": needed / seconds / bandwidth,
            },
            "drafters": rows,
        }
        del heads, model  # before the next


def run(flags: Flags) -> int:
    """Measure, print, write the files."""
    out = out_directory(flags.out)
    if flags.weights == "stored":
        raise UserError("a shape has no file whose weights could be read as stored")
    if flags.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    try:
        sizes = [int(size) for size in entries(flags.sizes)]
    except ValueError:
        raise UserError(
            f"--sizes takes numbers such as 8,64, not {flags.sizes!r}"
        ) from None
    for found in measure(
        find_shape(flags.shape),
        entries(flags.drafters or "") or list(DRAFTERS),
        dtype=flags.dtype or default_dtype(),
        weights=flags.weights,
        draft_weights=flags.draft_weights,
        context=flags.context,
        batch=flags.batch,
        sizes=sizes,
        rounds=flags.repeats,
    ):
        facts = device_facts() | {"shape": flags.shape, **found}
        write_json(out / "step_cost.json", facts)  # what is measured survives a kill
    rows = facts["drafters"]
    columns: dict[str, Cell] = {
        "drafter": "{drafter}",
        "heads, GB": lambda r: f"{r['head_bytes'] / 1e9:.2f}",
        **{f"{n} nodes": f"{{step_latency_ratios[{i}]:.2f}}x" for i, n in enumerate(sizes)},
        f"step, {sizes[-1]} nodes": lambda r: f"{1e3 * r['step_seconds']:.2f} ms",
    }
    write_report(out, "step_cost", facts, rows, columns, plain_line(facts))
    return 0


def plain_line(facts: Row) -> str:
    """What is printed below the table."""
    plain, speed = facts["plain"], facts["read_bandwidth_bytes_per_second"]
    return (
        f"plain decoding: {1e3 * plain['step_seconds']:.2f} ms a token, which needs "
        f"{plain['bytes_needed'] / 1e9:.2f} GB: {plain['bandwidth_share']:.0%} of the "
        f"measured {speed / 1e9:.1f} GB/s\n"
        "columns of nodes: latency of a step against a plain one, interleaved; trees: first nodes of "
        "the demo's Hydra growth order, four deep\n"
        f"{facts['shape']} with random weights in {facts['weights']}, {facts['dtype']} "
        f"arithmetic, {facts['products']} products, batch {facts['batch']}, {facts['context']} tokens in the cache ({facts['device']}, {facts['date']})"
    )


main = Program("python -m research step_cost", Flags, run, EXAMPLES)
