"""README.md of converted heads: facts, how to load them, measurements."""

import numpy as np

from medusa_jax.formats.export import Export
from medusa_jax.whole_files import Json


def model_card(export: Export, loading: str, out: str, tree: Json) -> str:
    """The text of README.md.

    Args:
      loading: how to load the directory, with places for `base`, `out`, `heads` and `layers`.
      out: its name.
      tree: the tree file of the heads, with its evidence; {} if there is none.
    """
    stored, heads = export.stored, export.stored.heads
    count = sum(int(np.prod(x.shape)) for x in export.params.values())
    loading = loading.format(
        base=export.base_name, out=out, heads=heads.n_heads, layers=heads.n_layers
    )
    measured = "\n".join(_held_out(stored.meta) + _fitted(tree) or [NOTHING, ""])
    return f"""---
base_model: {export.base_name}
tags:
- speculative-decoding
- {heads.drafter}
---

# Draft heads for {export.base_name}

The heads draft tokens and the backbone verifies them: the text is the backbone's.

- kind: {heads.drafter}
- heads: {heads.n_heads}
- layers per head: {heads.n_layers}
- LM heads: {heads.lm_head}
- parameters: {count:,}
- stored in: {export.kind.name}
- backbone: {export.base_name}
- read from: {stored.layout}

Loading: {loading}.

## Measured

{measured}
"""


NOTHING = (
    "Nothing yet: no held-out evaluation, fitted tree or benchmark came with these heads. "
    "Accepted length depends on the text; `python -m medusa_jax calibrate` and `bench` measure it."
)


def _held_out(meta: Json) -> list[str]:
    """The trainer's held-out evaluation."""
    recipe = meta.get("recipe")
    found = recipe.get("held_out") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(found, dict):
        return []
    names = ("accepted_length_chain", "accepted_length_tree")
    numbers = ", ".join(f"{name} {found[name]:.3f}" for name in names if name in found)
    return (
        [f"Held-out text, at step {recipe.get('step')}: {numbers}.", ""] if numbers else []
    )


def _fitted(tree: Json) -> list[str]:
    """Head accuracies and trees measured by `calibrate`."""
    evidence = tree.get("evidence")
    if not isinstance(evidence, dict):
        return []
    lines = [
        f"Trees fitted on {tree.get('device')} in {tree.get('dtype')} at batch "
        f"{tree.get('batch')}, temperature {tree.get('temperature')}, {tree.get('date')}, to "
        f"{evidence.get('positions')} positions:",
        "",
        "| nodes | tokens per step | step latency |",
        "|---|---|---|",
    ]
    for row in evidence.get("ladder", []):
        lines.append(
            f"| {row['nodes']} | {row['tokens_per_step']:.2f} | "
            f"{row['step_latency_ratio']:.2f}x |"
        )
    accuracies = ", ".join(f"{row[0]:.3f}" for row in evidence.get("head_accuracies", []))
    if accuracies:
        lines += ["", f"Top-1 accuracies of the heads: {accuracies}."]
    return [*lines, ""]
