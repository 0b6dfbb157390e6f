"""Fitting the tree to the heads and to this device (Medusa 2.3.3).

Three measurements, then a choice for each batch size: the ranks of the true tokens under the heads
on the model's own output, the tokens per step of the best tree of each size on held-out texts, and
step latencies on this device.
"""

from collections.abc import Sequence
from datetime import date
from functools import partial

import jax
import numpy as np

from medusa_jax.api import Model, Options, device_tree
from medusa_jax.api.asking import Prompt
from medusa_jax.evaluate.race import step_seconds
from medusa_jax.evaluate.recording import rank_texts
from medusa_jax.progress import Progress
from medusa_jax.tree import growth
from medusa_jax.tree.growth import Recorded
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

# Choices stored in a tree file, in order of worth: enough for trees of up to 128 nodes.
GROWTH = 127


def fit_tree(
    model: Model,
    prompts: Sequence[Prompt],
    options: Options,
    sizes: Sequence[int],
    *,
    batches: Sequence[int] = (1,),
    rounds: int = 7,
    copies: bool = True,
) -> Json:
    """Measure and choose a tree; return the content of a tree file with its evidence.

    Args:
      options: options for writing the texts; their temperature also selects the acceptance rule.
      sizes: numbers of nodes to time; 1, plain decoding, is always added.
      batches: batch sizes, one rung each; the evidence is measured at the first.
      copies: whether trees may hold a chain copied from the text.
    """
    texts = rank_texts(model, prompts, options)
    whole = Recorded.joined(texts)
    grow = partial(growth.order_by_steps, n_choices=GROWTH, copies=copies)
    order = grow(texts)
    sizes = sorted({1, *(s for s in sizes if s <= len(order.growth) + 1)})
    nested = [order.tree(size) for size in sizes]
    acceptance = "sampled" if options.temperature > 0 else "greedy"
    n_runs = len(nested) * (1 + rounds)
    with Progress(f"timing {len(nested)} trees", n_runs, "run") as bar:
        seconds = dict(zip(nested, step_seconds(
            model, nested, model.encode(prompts[0]), batch=batches[0],
            temperature=options.temperature, rounds=rounds, watch=bar.update,
        )))  # fmt: skip
    tokens = growth.held_out_tokens(texts, grow, sizes)
    row = partial(figures, texts, seconds)
    device = jax.devices()[0]
    found = {
        "growth": [list(c) for c in order.growth],
        "spares": [list(c) for c in order.spares],
        "platform": device.platform,
        "device": f"{device.device_kind}, {jax.local_device_count()} device(s)",
        "dtype": str(model.dtype),
        "temperature": options.temperature,
        "acceptance": acceptance,
        "batch": batches[0],
        "values": "joint",
        "date": date.today().isoformat(),
        "evidence": {
            "prompts": len(prompts),
            "positions": len(whole.ranks_PK),
            "head_accuracies": np.round(growth.head_accuracies(whole.ranks_PK), 4).tolist(),
            "ladder": [row(tree, n) for tree, n in zip(nested, tokens)],
        },
    }
    return with_rungs(model, found, batches)


def figures(
    texts: Sequence[Recorded], seconds: dict[Tree, float], tree: Tree, tokens: float
) -> Json:
    """All figures of one tree.

    Args:
      seconds: seconds of a step with each timed tree, including plain decoding.
      tokens: tokens per step on held-out texts.
    """
    latency = seconds[tree]
    ratio = latency / seconds[Tree.none()]
    return {
        "nodes": tree.n_nodes,
        "depth": tree.depth,
        "copied": len(tree.copied_C),
        "tokens_per_step": round(tokens, 4),
        "fitted_tokens_per_step": round(growth.replayed_tokens(texts, tree), 4),
        "step_seconds": latency,
        "step_latency_ratio": round(ratio, 4),
        "predicted_speedup": round(tokens / ratio, 4),
    }


def with_rungs(model: Model, found: Json, batches: Sequence[int]) -> Json:
    """The file with the choice for each number of rows; the first one's is the file's own."""

    def of_size(nodes: int) -> Json:
        return {"choices": found["growth"][: nodes - 1], "nodes": nodes}

    predicted = max(found["evidence"]["ladder"], key=lambda row: row["predicted_speedup"])
    first, rungs = of_size(predicted["nodes"]) | found, []
    with Progress("choosing by batch size", len(batches), "batch size") as bar:
        for rows in batches:
            rungs.append(device_tree.measure_rung(model, first, rows))
            bar.update()
    return of_size(rungs[0]["nodes"]) | found | {"batches": rungs}
