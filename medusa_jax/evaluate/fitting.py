"""Fitting the tree to the heads and to this device (Medusa 2.3.3).

Three measurements, then a choice for each number of rows: the ranks of the true tokens under the
heads on the model's own output, the tokens per step that the best tree of each size gives on texts
that it was not grown from, and step latencies on this device.
"""

from collections.abc import Sequence
from datetime import date
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from medusa_jax.api import Model, Options, device_tree
from medusa_jax.api.batching import equal_batches
from medusa_jax.console import announced
from medusa_jax.decoding.copying import copied_lengths
from medusa_jax.decoding.generate import power_of_two
from medusa_jax.decoding.ranks import rank_tuples
from medusa_jax.decoding.sampling import row_keys
from medusa_jax.errors import UserError
from medusa_jax.evaluate import shapes
from medusa_jax.evaluate.latency import step_seconds
from medusa_jax.tree import Choice, Tree, growth
from medusa_jax.tree.growth import Recorded

# Choices that are kept in order of worth: trees of up to 128 nodes can be cut from a file.
GROWTH = 127
# Longest chain that is copied from the text, as prompt lookup has it.
MOST_COPIED = 10
# Prompts that are continued at a time.
ROWS = 8


def rank_texts(model: Model, prompts: Sequence[Any], options: Options) -> list[Recorded]:
    """Ranks, and what copying has right, on the model's own continuation of each prompt.

    Only positions whose guesses all fall on generated text count: from the last prompt token
    on, as far as the deepest head still has its token.

    Raises:
      UserError: fewer than two continuations are long enough.
    """
    lengths = jax.jit(jax.vmap(copied_lengths, (0, 0, None)), static_argnums=2)
    ranks = jax.jit(rank_tuples, static_argnames=("drafter", "no_repeat_ngram_size"))
    K = model.drafter.n_heads
    texts = []
    with tqdm(
        total=len(prompts), unit="prompt", desc="rank statistics", disable=None
    ) as bar:
        for own, rows in equal_batches(len(prompts), ROWS):
            noise = None
            if options.temperature > 0:
                seed_B = jnp.full((len(rows),), options.seed % 2**32, jnp.uint32)
                keys = row_keys(seed_B, jnp.zeros((len(rows),), jnp.int32))
                noise = (keys, jnp.full((len(rows),), options.temperature))
            batch = [prompts[i] for i in rows]
            results = model.generate(batch, options, [0] * len(rows), tree="none")
            ids = [model.encode(p) + r.token_ids for p, r in zip(batch, results)]
            length_B = np.array([len(x) for x in ids], np.int32)
            tokens_BT = np.zeros(
                (len(rows), power_of_two(int(length_B.max()), 64)), np.int32
            )
            for row, x in zip(tokens_BT, ids):
                row[: len(x)] = x
            ranks_BTK = np.asarray(
                ranks(
                    model.drafter,
                    model.variables["heads"],
                    model.backbone,
                    jnp.asarray(tokens_BT),
                    jnp.asarray(length_B),
                    noise,
                    model.no_repeat_ngram_size,
                )
            )
            copied_BT = np.asarray(lengths(tokens_BT, length_B, MOST_COPIED))
            for b in range(len(own)):
                # The step after prefill starts at the last prompt position.
                here = slice(results[b].prompt_tokens - 1, int(length_B[b]) - K - 1)
                if here.stop > here.start:
                    texts.append(Recorded(ranks_BTK[b, here], copied_BT[b, here]))
            bar.update(len(own))
    if len(texts) < 2:
        raise UserError(
            f"{len(texts)} of {len(prompts)} continuations are long enough to calibrate on, two "
            "are needed: trees are counted on texts that they were not grown from"
        )
    return texts


def fit_tree(
    model: Model,
    prompts: Sequence[Any],
    options: Options,
    sizes: Sequence[int],
    *,
    batches: Sequence[int] = (1,),
    rounds: int = 7,
    worth: str = "joint",
    copies: bool = True,
    level_sizes: Sequence[int] = (),
    n_dense: int = 0,
) -> dict[str, Any]:
    """Measure and choose; returns the content of a tree file, its evidence included.

    Args:
      options: how the texts are written; their temperature decides the acceptance too.
      sizes: numbers of nodes to time; 1, plain decoding, is always among them.
      batches: numbers of rows, each of which gets its rung; the evidence is of the first.
      worth: of a node: "joint", the measured frequency of its path, or "product", the paper's
        product of head accuracies.
      copies: whether trees may hold a chain copied from the text.
      level_sizes: numbers of nodes of the trees of one depth.
      n_dense: how many random dense trees to set beside the fitted ones.
    """
    texts = rank_texts(model, prompts, options)
    whole = Recorded.joined(texts)
    tuples_PK = whole.ranks_PK

    def grow(recorded: Recorded) -> list[Choice]:
        if worth == "product":
            accuracies = growth.head_accuracies(recorded.ranks_PK)
            return growth.product_growth(accuracies, GROWTH)
        if copies:
            return growth.growth_with_copies(recorded, GROWTH)
        return growth.joint_growth(recorded.ranks_PK, GROWTH)

    choices = grow(whole)
    sizes = sorted({1, *(s for s in sizes if s <= len(choices) + 1)})
    nested = [Tree.from_choices(choices[: size - 1]) for size in sizes]
    level = shapes.of_one_depth(texts, grow, level_sizes)
    scored = model.drafter.heads.draft_vocab or model.config.vocab_size
    dense = shapes.random_dense(
        tuples_PK.shape[1], n_dense, most_wide=min(growth.MISS, scored)
    )
    timed = list(dict.fromkeys([*nested, *level, *shapes.to_time(dense)]))
    acceptance = "sampled" if options.temperature > 0 else "greedy"
    with announced(f"timing {len(timed)} trees"):
        seconds = dict(zip(timed, step_seconds(
            model, timed, model.encode(prompts[0]), batch=batches[0], acceptance=acceptance,
            temperature=options.temperature, rounds=rounds,
        )))  # fmt: skip
    tokens = growth.held_out_tokens(texts, grow, sizes)

    def row(tree: Tree, tokens: float) -> dict[str, Any]:
        ratio = shapes.latency(tree, seconds) / seconds[Tree.none()]
        return {
            "nodes": tree.n_nodes,
            "depth": tree.depth,
            "copied": len(tree.copied_C),
            "tokens_per_step": round(tokens, 4),
            "fitted_tokens_per_step": round(growth.replayed_tokens(texts, tree), 4),
            "step_seconds": shapes.latency(tree, seconds),
            "step_latency_ratio": round(ratio, 4),
            "predicted_speedup": round(tokens / ratio, 4),
        }

    device = jax.devices()[0]
    found = {
        "growth": [list(c) for c in choices],
        "platform": device.platform,
        "device": f"{device.device_kind}, {jax.local_device_count()} device(s)",
        "dtype": str(model.dtype),
        "temperature": options.temperature,
        "acceptance": acceptance,
        "batch": batches[0],
        "values": worth,
        "date": date.today().isoformat(),
        "evidence": {
            "prompts": len(prompts),
            "positions": len(tuples_PK),
            "head_accuracies": np.round(growth.head_accuracies(tuples_PK), 4).tolist(),
            "ladder": [row(tree, n) for tree, n in zip(nested, tokens)],
            "one_depth": [row(tree, n) for tree, n in level.items()],
            "dense": [
                row(tree, growth.replayed_tokens(texts, tree)) | {"widths": widths}
                for widths, tree in dense
            ],
        },
    }
    rungs = [
        device_tree.choose_on_device(
            model, found, rows, device_tree.kept_for(model, found, rows), afresh=True
        )
        for rows in batches
    ]
    best = rungs[0]["nodes"]
    return (
        {"choices": found["growth"][: best - 1], "nodes": best} | found | {"batches": rungs}
    )
