"""`bench race`: drafters, trees and plain decoding, interleaved on every prompt.

For every contender: tokens per step, step latency and speed-up against this engine's own
autoregressive loop, divergences, memory and training cost, and how much its text repeats itself (text
that runs in circles is easy to guess).
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_jax.commands.flags import (
    BaseFlags,
    GenerationFlags,
    add_base,
    add_generation,
    at_least,
    command,
    generation_options,
    load_model,
    run_command,
)
from medusa_jax.commands.prompts import (
    PromptFlags,
    add_prompt_files,
    first_prompts,
    questions_of,
)
from medusa_jax.evaluate.tables import Cell, device_facts, write_report
from medusa_jax.repetition import mean_repeated_ngram_share
from medusa_jax.tree import Tree

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

TITLES = {
    "mean_accepted_length": "mean accepted length",
    "step_latency_ratio": "step latency against plain decoding",
    "speedup": "speed-up against plain decoding",
}


@dataclass(frozen=True, kw_only=True)
class RaceFlags(PromptFlags, GenerationFlags, BaseFlags):
    """Flags of every race."""

    drafters: str | None
    repeats: int
    out: str


@dataclass(frozen=True, kw_only=True)
class Flags(RaceFlags):
    """Flags of `bench race`."""

    trees: str


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
    model: Any
    trees: dict[str, Tree]
    trained_tokens: int | None


def race_parser(
    name: str, what: str, examples: str, drafters: str
) -> argparse.ArgumentParser:
    """The flags of `RaceFlags`; `drafters` says what the default is."""
    p = command(f"python -m medusa_jax bench {name}", what, examples)
    add_prompt_files(p, 50)
    p.add_argument(
        "--model", help="directory, .gguf file, hub id or name (default: the demo)"
    )
    add_base(p)
    p.add_argument("--drafters", help="comma-separated names, directories, files or hub ids, "
                   f"none for plain decoding (default: {drafters})")  # fmt: skip
    add_generation(p)
    p.add_argument("--repeats", type=at_least(1), default=3,
                   help="timed rounds; medians count (default: 3)")  # fmt: skip
    p.add_argument("--out", default="work/bench", help="directory for results")
    return p


def add_trees(p: argparse.ArgumentParser) -> None:
    """--trees."""
    p.add_argument("--trees", default="auto", help="comma-separated --tree values (cartesian "
                   "widths with x: cartesian:2x3)")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = race_parser(
        "race",
        "Compare drafters and trees with the autoregressive loop.",
        EXAMPLES,
        "all heads that come with the model, prompt_lookup and lookahead; NAME@TREE gives one a tree",
    )
    add_trees(p)
    return p


def tree_specs(text: str) -> list[str]:
    """ "auto,cartesian:2x3" -> ["auto", "cartesian:2,3"]."""
    return [spec.replace("x", ",") if ":" in spec else spec for spec in text.split(",")]


def default_names(model: str | None) -> list[str]:
    """All heads that come with the model, and the drafters that need none."""
    from medusa_jax.api.finding import bundled_draft_model, bundled_heads

    draft_model = ["draft_model"] if bundled_draft_model(model) else []
    return [*bundled_heads(model), *draft_model, "prompt_lookup", "lookahead"]


def load_entrants(flags: RaceFlags, names: Sequence[str], trees: str) -> Iterator[Entrant]:
    """The drafters, all on one copy of the backbone; `trees` for those named without one."""
    backbone: Any = None
    for each in names:
        name, _, own = each.partition("@")
        specs = tree_specs(own or trees)
        spec = "auto" if "auto" in specs else specs[0]
        model = load_model(flags, name, tree=spec)
        backbone = backbone or model.variables["backbone"]
        model.variables = model.variables | {"backbone": backbone}
        found = {s: model.tree if s == spec else model.parse_tree(s) for s in specs}
        yield Entrant(name, model, found, training_of(flags.model, name))


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


def trained_tokens(recipe: Mapping[str, Any]) -> int | None:
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
    from medusa_jax.evaluate.race import TEXT, ourselves, race

    questions = questions_of(flags, flags.model)
    out, options = out_directory(flags.out), generation_options(flags)
    names = flags.drafters.split(",") if flags.drafters else default_names(flags.model)
    entrants = list(load_entrants(flags, names, flags.trees))
    model = entrants[0].model
    if flags.questions:
        options = ending_turns(model, options, find_template(model, flags.chat_template))
    prompts = first_prompts(flags, model, questions, flags.max_new_tokens)
    contenders = [ourselves(model, Tree.none(), options, facts={"trained_tokens": 0})]
    for e in entrants:
        for spec, tree in e.trees.items():
            label = e.model.drafts_by(tree) if tree.depth else e.name
            label += "" if spec == "auto" or spec.isdecimal() else f", {spec}"
            facts = {"trained_tokens": e.trained_tokens}
            contenders.append(ourselves(e.model, tree, options, label=label, facts=facts))
    rows = race(contenders, prompts, flags.repeats)
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
    draw(rows, out / "race.png", TITLES, "", "{label}, {tree_nodes}")
    return 0


def out_directory(path: str) -> Path:
    """--out, made; compiled programs are kept on disk."""
    from medusa_jax.console import use_compilation_cache

    use_compilation_cache()
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    return out


def draw(
    rows: Sequence[Mapping[str, Any]], path: Path, titles: Mapping[str, str], series: str, bar: str
) -> None:  # fmt: skip
    """One chart of bars for each field.

    Args:
      titles: field -> title of its chart.
      series, bar: format strings of a row: what a colour and what a bar stands for.
    """
    from medusa_jax.plots import draw_bars

    charts: dict[str, dict[str, dict[str, float]]] = {}
    for field, title in titles.items():
        for row in rows:
            own = charts.setdefault(title, {}).setdefault(
                series.format_map(row) or title, {}
            )
            own[bar.format_map(row)] = row[field]
    draw_bars(charts, path=path, level=1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)
