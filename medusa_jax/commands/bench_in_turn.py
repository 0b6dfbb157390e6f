"""`bench --in_turn`: every drafter of the papers on one model, side by side."""

import argparse
import dataclasses
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from medusa_jax.commands.bench_questions import first_prompts
from medusa_jax.commands.flags import at_least, generation_options, load_model
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.whole_files import write_json, write_text


def add_in_turn(p: argparse.ArgumentParser) -> None:
    """--in_turn."""
    p.add_argument("--in_turn", action="store_true",
                   help="instead: all of --drafters and plain decoding in turn on every prompt, with "
                   "memory and training cost; NAME@TREE gives one a tree (cartesian widths with x), "
                   "else it is auto's. Default: all drafters that come with the model, prompt_lookup "
                   "and lookahead")  # fmt: skip
    p.add_argument("--ladder", type=at_least(0), default=0, metavar="NODES",
                   help="the same for each of --drafters with a chain, the best Cartesian tree of at most so "
                   "many nodes, and the fitted tree of so many (Medusa's table 3)")  # fmt: skip


def run_in_turn(
    flags: argparse.Namespace, questions: Sequence[dict[str, Any]], out: Path
) -> int:
    """Measure, print the table, write the files."""
    import jax

    from medusa_jax.evaluate import in_turn
    from medusa_jax.evaluate.conversation import ending_turns, find_template

    entrants = load_entrants(flags)
    if flags.ladder:
        entrants = [rung for e in entrants for rung in ladder(e, flags.ladder)]
    model, options = entrants[0].model, generation_options(flags)
    if flags.questions:
        options = ending_turns(model, options, find_template(model, flags.chat_template))
    prompts = first_prompts(flags, model, questions)
    rows = in_turn.measure(entrants, prompts, options, flags.repeats)
    device = jax.devices()[0]
    facts = {
        "date": date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "dtype": str(entrants[0].model.dtype),
        "temperature": flags.temperature,
        "max_new_tokens": flags.max_new_tokens,
        "repeats": flags.repeats,
        "state_text": in_turn.TEXT,
        "rows": rows,
    }
    write_json(out / "in_turn.json", facts)
    text = in_turn_table(rows)
    write_text(out / "in_turn.md", text + "\n")
    draw(rows, out)
    print(text)
    print(
        f"\nstate: of one row behind {in_turn.TEXT} tokens ({facts['device']}, {facts['dtype']}, "
        f"{facts['date']})"
    )
    inform(f"wrote {out}/in_turn.json, in_turn.md and in_turn.png")
    return 0


def default_names(flags: argparse.Namespace) -> list[str]:
    """All heads that come with the model; except for --ladder also the drafters that need none."""
    from medusa_jax.api.finding import bundled_draft_model, bundled_heads

    heads = bundled_heads(flags.model)
    if flags.ladder:
        return heads
    own = ["draft_model"] if bundled_draft_model(flags.model) else []
    return [*heads, *own, "prompt_lookup", "lookahead"]


def load_entrants(flags: argparse.Namespace) -> list[Any]:
    """The drafters of --drafters, all on one copy of the backbone."""
    from medusa_jax.api.baselines import find_baseline
    from medusa_jax.api.finding import bundled_draft_model, find_heads
    from medusa_jax.evaluate.in_turn import Entrant, recipe_of, trained_tokens

    asked = flags.drafters.split(",") if flags.drafters else default_names(flags)
    # The ladder has trees of its own: what "auto" is here need not be measured.
    unsaid = "none" if flags.ladder else "auto"
    entrants: list[Entrant] = []
    for each in asked:
        name, _, tree = each.partition("@")
        spec = (tree.replace("x", ",") if ":" in tree else tree) or unsaid
        model = load_model(flags, name, tree=spec)
        if entrants:
            shared = entrants[0].model.variables["backbone"]
            model.variables = model.variables | {"backbone": shared}
        if baseline := find_baseline(name, bundled_draft_model(flags.model)):
            tokens = trained_tokens(recipe_of(baseline.path)) if baseline.path else 0
        else:
            stored = find_heads(flags.model, name)
            tokens = trained_tokens(stored.meta.get("recipe", {})) if stored else 0
        label = model.drafts_by() if model.tree.depth else name
        entrants.append(Entrant(label, model, model.tree, tokens))
    return entrants


def ladder(entrant: Any, n_nodes: int) -> list[Any]:
    """A drafter with a chain, a Cartesian tree and a fitted one.

    Raises:
      UserError: no tree is fitted to it.
    """
    import numpy as np

    from medusa_jax.tree import Tree, growth, tree_of_size

    found = entrant.model.calibrated or {}
    accuracy = found.get("evidence", {}).get("head_accuracies")
    if n_nodes < 2:
        raise UserError(f"--ladder takes 2 nodes or more, not {n_nodes}")
    if not accuracy:
        raise UserError(
            f"--ladder needs a calibrated tree beside the heads: {entrant.label} has none"
        )
    widths = growth.best_cartesian(np.array(accuracy), n_nodes)
    trees = {
        "chain": Tree.chain(entrant.model.drafter.n_heads),
        f"cartesian {'x'.join(map(str, widths))}": Tree.cartesian(widths),
        "fitted": tree_of_size(found["growth"], n_nodes),
    }
    drafts_by = entrant.model.drafts_by
    return [
        dataclasses.replace(entrant, label=f"{drafts_by(tree)}, {kind}", tree=tree)
        for kind, tree in trees.items()
    ]


def in_turn_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `evaluate.in_turn.measure` as Markdown."""
    header = (
        "drafter", "nodes", "mean accepted length", "step latency", "speed-up", "off length / latency",
        "tokens/s", "diverged", "parameters, MB", "state, MB", "trained on, M tokens",
    )  # fmt: skip
    cells = [
        (
            r["drafter"],
            r["tree_nodes"],
            f"{r['mean_accepted_length']:.2f}",
            f"{r['step_latency_ratio']:.2f}x",
            f"{r['speedup']:.2f}x",
            f"{100 * r['difference']:+.1f}%",
            f"{r['tokens_per_second']:.0f}",
            f"{r['divergences']} of {r['prompts']}",
            f"{r['parameter_bytes'] / 1e6:.2f}",
            f"{r['state_bytes'] / 1e6:.2f}",
            "?" if r["trained_tokens"] is None else f"{r['trained_tokens'] / 1e6:.1f}",
        )
        for r in rows
    ]
    return markdown_table(header, cells)


def draw(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """in_turn.png: accepted length, step latency and speed-up of every drafter."""
    from medusa_jax.plots import draw_bars

    charts = {
        title: {title: {f"{r['drafter']}, {r['tree_nodes']}": r[field] for r in rows}}
        for title, field in (
            ("mean accepted length", "mean_accepted_length"),
            ("step latency against plain decoding", "step_latency_ratio"),
            ("speed-up against plain decoding", "speedup"),
        )
    }
    draw_bars(charts, path=out / "in_turn.png", level=1.0)
