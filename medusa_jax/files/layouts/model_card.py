"""The model card of exported heads: what they are, how to load them, what was measured."""

import os

from medusa_jax.files.layouts.layout import Export, Layout
from medusa_jax.notation import byte_size
from medusa_jax.whole_files import Json

NOTHING = (
    "Nothing yet: no held-out evaluation, fitted tree or benchmark came with these heads. "
    "Accepted length depends on the text; `medusa calibrate` and `bench` measure it."
)


def model_card(export: Export, layout: Layout, out: str, tree: Json, n_bytes: int) -> str:
    """The text of README.md.

    Args:
      layout: theirs.
      out: the name of their directory.
      tree: the tree file of the heads, with its evidence; {} if there is none.
      n_bytes: of its weights.
    """
    stored, heads, base = export.stored, export.stored.heads, export.base_name
    on_hub = "/" in base and not os.path.exists(base)
    name = base if on_hub else os.path.basename(os.path.abspath(base))
    figures = "\n".join(_held_out(stored.meta) + _calibration(tree) or [NOTHING, ""])
    # The hub refuses a base_model that is not an id.
    id_line = f"base_model: {base.partition('@')[0]}\n" if on_hub else ""
    return f"""---
{id_line}tags:
- speculative-decoding
- {heads.drafter}
---

# Draft heads for {name}

The heads draft tokens and the backbone verifies them: the text is the backbone's.

- kind: {heads.drafter}
- heads: {heads.n_heads}
- layers per head: {heads.n_layers}
- LM heads, as trained: {heads.lm_head}
- weights: {byte_size(n_bytes)} in {export.kind.name}
- backbone: {name}
- read from: {stored.layout}

Loading: {layout.how_to_load(heads, name, out)}.

## Measured

{figures}
"""


def _held_out(meta: Json) -> list[str]:
    """The trainer's held-out evaluation."""
    recipe = meta.get("recipe")
    held_out = recipe.get("held_out") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(held_out, dict):
        return []
    trees = {"chain": "a chain of first guesses", "tree": "the best tree of 64 nodes"}
    numbers = ", ".join(
        f"{held_out[key]:.3f} with {tree}"
        for name, tree in trees.items()
        if (key := f"accepted_length_{name}") in held_out
    )
    line = f"Tokens per step on held-out text, at step {recipe.get('step')}: {numbers}."
    return [line, ""] if numbers else []


def _calibration(tree: Json) -> list[str]:
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
        ratio = row.get("step_latency_ratio")
        latency = f"{ratio:.2f}x" if ratio else "not timed"
        lines.append(f"| {row['nodes']} | {row['tokens_per_step']:.2f} | {latency} |")
    accuracies = ", ".join(f"{row[0]:.3f}" for row in evidence.get("head_accuracies", []))
    if accuracies:
        lines += ["", f"Top-1 accuracies of the heads: {accuracies}."]
    return [*lines, ""]
