"""README.md of converted heads: facts, how to load them, measurements."""

import numpy as np

from medusa_jax.formats.export import Export
from medusa_jax.whole_files import Json


def model_card(
    export: Export, loading: str, out: str, tree: Json | None, bench: Json | None
) -> str:
    """The text of README.md.

    Args:
      loading: how to load the directory, with places for `base`, `out`, `heads` and `layers`.
      out: its name.
      tree: the tree file of the heads, with its evidence.
      bench: the output of `python -m medusa_jax bench`.
    """
    stored, heads = export.stored, export.stored.heads
    count = sum(int(np.prod(x.shape)) for x in export.params.values())
    facts = {
        "kind": heads.drafter,
        "heads": heads.n_heads,
        "layers per head": heads.n_layers,
        "LM heads": heads.lm_head,
        "parameters": f"{count:,}",
        "stored in": export.kind.name,
        "backbone": export.base_name,
        "read from": stored.layout,
    }
    loading = loading.format(
        base=export.base_name, out=out, heads=heads.n_heads, layers=heads.n_layers
    )
    lines = [
        "---",
        f"base_model: {export.base_name}",
        "tags:",
        "- speculative-decoding",
        f"- {heads.drafter}",
        "---",
        "",
        f"# Draft heads for {export.base_name}",
        "",
        "The heads draft tokens and the backbone verifies them: the text is the backbone's.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        f"Loading: {loading}.",
        "",
        "## Measured",
        "",
        *(_held_out(stored.meta) + _fitted(tree) + _benched(bench) or NOTHING),
    ]
    return "\n".join(lines) + "\n"


NOTHING = [
    "Nothing yet: no held-out evaluation, fitted tree or benchmark came with these heads. "
    "Accepted length depends on the text; `python -m medusa_jax calibrate` and `bench` measure it.",
    "",
]


def _held_out(meta: Json) -> list[str]:
    """The trainer's held-out evaluation."""
    recipe = meta.get("recipe")
    if not isinstance(recipe, dict) or not isinstance(recipe.get("held_out"), dict):
        return []
    found = recipe["held_out"]
    shown = {
        name: found[name]
        for name in ("accepted_length_chain", "accepted_length_tree")
        if name in found
    }
    numbers = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
    return [f"Held-out text, at step {recipe.get('step')}: {numbers}.", ""] if shown else []


def _fitted(tree: Json | None) -> list[str]:
    """Head accuracies and trees measured by `calibrate`."""
    evidence = (tree or {}).get("evidence")
    if not tree or not isinstance(evidence, dict):
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


def _benched(bench: Json | None) -> list[str]:
    """The benchmark's rows, from runs interleaved with plain decoding."""
    if not bench:
        return []
    lines = [
        f"Compared with plain decoding in interleaved runs, {bench.get('device', 'device not noted')}:",
        "",
        "| drafter | nodes | T | mean accepted length | step latency | speed-up | diverged |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in bench["rows"]:
        lines.append(
            f"| {row['drafter']} | {row['tree_nodes']} | {row['temperature']:g} | "
            f"{row['mean_accepted_length']:.2f} | {row['step_latency_ratio']:.2f}x | "
            f"{row['speedup']:.2f}x | {row['divergences']} of {row['prompts']} |"
        )
    return [*lines, ""]
