"""`bench race`: drafters, trees and plain decoding, interleaved on every prompt.

For every contender: tokens per step, step latency and speed-up against this engine's own
autoregressive loop, divergences, memory and training cost, and how much its text repeats itself (text
that runs in circles is easy to guess).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_jax.commands.flags import (
    BaseFlags,
    GenerationFlags,
    Program,
    at_least,
    flag,
    generation_options,
    load_model,
)
from medusa_jax.commands.prompts import PromptFlags, first_prompts, questions_of
from medusa_jax.evaluate.tables import Cell, Row, device_facts, write_report
from medusa_jax.plots import can_draw
from medusa_jax.repetition import mean_repeated_ngram_share
from medusa_jax.tree.tree import Tree

if TYPE_CHECKING:
    from medusa_jax.api import Model, Options
    from medusa_jax.evaluate.race import Contender

EXAMPLES = """examples:
  python -m medusa_jax bench race
  python -m medusa_jax bench race --drafters hydra,medusa --trees auto,64 --limit 8
  python -m medusa_jax bench race --drafters medusa@8,prompt_lookup@chain:3 --limit 16
  python -m medusa_jax bench race --model path/to/model --drafters path/to/heads,none \\
      --prompts question.jsonl
"""
COLUMNS: dict[str, Cell] = {
    "drafter": "{label}",
    "nodes": "{tree_nodes}",
    "mean accepted length": "{mean_accepted_length:.2f}",
    "step latency": "{step_latency_ratio:.2f}x",
    "speed-up": "{speedup:.2f}x",
    "off length / latency": "{difference:+z.1%}",
    "with prefill": "{end_to_end_speedup:.2f}x",
    "of ideal": "{efficiency:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "diverged": "{divergences} of {texts}",
    "repeated 4-grams": "{repeated_4grams:.2f}",
    "parameters, MB": lambda r: f"{r['parameter_bytes'] / 1e6:.2f}",
    "state, MB": lambda r: f"{r['state_bytes'] / 1e6:.2f}",
    "trained on, M tokens": lambda r: f"{r['trained_tokens'] / 1e6:.1f}",
}


@dataclass(frozen=True, kw_only=True)
class RaceFlags(PromptFlags, GenerationFlags, BaseFlags):
    """Flags of every race."""

    drafters: str | None = flag(
        "comma-separated names, directories, files or hub ids, none for plain decoding (default: the "
        "model's own heads)",
        None,
    )
    repeats: int = flag("timed rounds; medians count", 3, type=at_least(1))
    out: str = flag("directory for results", "work/bench")


@dataclass(frozen=True, kw_only=True)
class TreeFlags(RaceFlags):
    """Flags of a race between trees."""

    trees: str = flag(
        "comma-separated --tree values (cartesian widths with x: cartesian:2x3)", "auto"
    )


@dataclass(frozen=True, kw_only=True)
class Flags(TreeFlags):
    """Compare drafters and trees with the autoregressive loop.

    By default: all heads that come with the model, prompt_lookup and lookahead; NAME@TREE gives one a tree.
    """


@dataclass(frozen=True)
class Entrant:
    """A drafter in the race.

    Attributes:
      name: as given.
      model: the backbone with this drafter; all entrants share one backbone.
      trees: --tree value -> tree.
      trained_tokens: tokens over all its training steps; None if unknown.
    """

    name: str
    model: "Model"
    trees: dict[str, Tree]
    trained_tokens: int | None


def tree_specs(text: str) -> list[str]:
    """ "auto,cartesian:2x3" -> ["auto", "cartesian:2,3"]."""
    return [spec.replace("x", ",") if ":" in spec else spec for spec in text.split(",")]


def default_names(model: str | None) -> list[str]:
    """All heads that come with the model, and the drafters that need none."""
    from medusa_jax.api.finding import bundled_draft_model, bundled_heads

    draft_model = ["draft_model"] if bundled_draft_model(model) else []
    return [*bundled_heads(model), *draft_model, "prompt_lookup", "lookahead"]


def names_of(flags: RaceFlags) -> list[str]:
    """--drafters, or the model's own heads."""
    from medusa_jax.api import default_drafter

    return (flags.drafters or default_drafter(flags.model)).split(",")


def load_entrants(flags: RaceFlags, names: Sequence[str], trees: str) -> Iterator[Entrant]:
    """The drafters, all on one copy of the backbone; `trees` for those named without one."""
    first: Model | None = None
    for each in names:
        name, _, own = each.partition("@")
        specs = tree_specs(own or trees)
        spec = "auto" if "auto" in specs else specs[0]
        model = load_model(flags, name, tree=spec)
        first = first or model
        model.share_backbone(first)
        found = {s: model.tree if s == spec else model.parse_tree(s) for s in specs}
        yield Entrant(name, model, found, training_of(flags.model, name))


def contenders_of(entrants: Sequence[Entrant], options: "Options") -> "list[Contender]":
    """Plain decoding, and every entrant with each of its trees."""
    from medusa_jax.evaluate.race import ourselves

    facts: dict[str, int | None] = {"trained_tokens": 0}
    found = [ourselves(entrants[0].model, Tree.none(), options, facts=facts)]
    for e in entrants:
        for spec, tree in e.trees.items():
            label = e.model.drafts_by(tree) if tree.depth else e.name
            label += "" if spec == "auto" or spec.isdecimal() else f", {spec}"
            facts = {"trained_tokens": e.trained_tokens}
            found.append(ourselves(e.model, tree, options, label=label, facts=facts))
    return found


def training_of(model: str | None, name: str) -> int | None:
    """Tokens that a drafter was trained on; None if unknown."""
    from medusa_jax.api.baselines import find_baseline
    from medusa_jax.api.finding import bundled_draft_model, find_heads

    baseline = find_baseline(name, bundled_draft_model(model))
    if baseline is None:
        stored = find_heads(model, name)
        return trained_tokens(stored.meta.get("recipe", {})) if stored else 0
    if not baseline.path:
        return 0
    recipe = Path(baseline.path) / "recipe.json"  # saved by train.py next to a backbone
    return trained_tokens(json.loads(recipe.read_text()) if recipe.is_file() else {})


def trained_tokens(recipe: Row) -> int | None:
    """Training tokens according to the saved recipe; None if unknown.

    Includes the training of the heads that the run started from.
    """
    config = recipe.get("config", {})
    training = config.get("train", {})
    sizes = recipe.get("step"), training.get("batch_size"), config.get("data", {}).get("seq_len")  # fmt: skip
    if not all(isinstance(n, int) for n in sizes):
        return None
    before = trained_tokens(recipe.get("start", {})) if training.get("heads_path") else 0
    return None if before is None else before + math.prod(sizes)


def run(flags: Flags) -> int:
    """Race all drafters, all their trees and plain decoding; print the table, write the files."""
    from medusa_jax.evaluate.bandwidth import bytes_per_token, read_bandwidth
    from medusa_jax.evaluate.conversation import ending_turns, find_template
    from medusa_jax.evaluate.race import TEXT, race

    questions = questions_of(flags, flags.model)
    out, options = out_directory(flags.out), generation_options(flags)
    names = names_of(flags) if flags.drafters else default_names(flags.model)
    entrants = list(load_entrants(flags, names, flags.trees))
    model = entrants[0].model
    if flags.questions:
        options = ending_turns(model, options, find_template(model, flags.chat_template))
    prompts = first_prompts(flags, model, questions, flags.max_new_tokens)
    rows = race(contenders_of(entrants, options), prompts, flags.repeats)
    real = [q["continuation_ids"][: flags.max_new_tokens] for q in questions if "continuation_ids" in q]  # fmt: skip
    needed = bytes_per_token(model, 256)
    bandwidth, speed = read_bandwidth(needed), rows[0]["tokens_per_second"]
    facts = device_facts() | {
        "dtype": str(model.dtype),
        "temperature": flags.temperature,
        "max_new_tokens": flags.max_new_tokens,
        "repeats": flags.repeats,
        "state_text": TEXT,
        "bytes_per_token": needed,
        "read_bandwidth_bytes_per_second": bandwidth,
        "autoregressive_bandwidth_share": needed * speed / bandwidth,
        "repeated_4grams_real": mean_repeated_ngram_share(real) if real else None,
        "rows": rows,
    }
    notes = (
        f"autoregressive loop: {speed:.0f} tokens/s, {needed / 1e6:.1f} MB read per token, "
        f"{facts['autoregressive_bandwidth_share']:.0%} of the {bandwidth / 1e9:.1f} GB/s at which "
        f"that many bytes can be read here\nstate: of one row after {TEXT} tokens; T "
        f"{flags.temperature:g} ({facts['device']}, {facts['dtype']}, {facts['date']})"
    )
    if real:
        notes += f"\nrepeated 4-grams of the real text: {facts['repeated_4grams_real']:.2f}"
    write_report(out, "race", facts, rows, COLUMNS, notes)
    if can_draw():
        draw(rows, out / "race.png")
    return 0


def out_directory(path: str) -> Path:
    """--out, created; compiled programs are kept on disk."""
    from medusa_jax.console import use_compilation_cache

    use_compilation_cache()
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    return out


def draw(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """A chart of bars for each of three figures, a bar per row."""
    from medusa_jax.plots import draw_bars

    titles = {
        "mean accepted length": "mean_accepted_length",
        "step latency against plain decoding": "step_latency_ratio",
        "speed-up against plain decoding": "speedup",
    }
    bars = ["{label}, {tree_nodes}".format_map(row) for row in rows]
    charts = {t: {t: dict(zip(bars, (r[f] for r in rows)))} for t, f in titles.items()}
    draw_bars(charts, path=path, level=1.0)


main = Program("python -m medusa_jax bench race", Flags, run, EXAMPLES)
