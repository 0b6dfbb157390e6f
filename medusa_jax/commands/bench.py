"""`python -m medusa_jax bench`: drafters, trees and plain decoding, interleaved on every prompt.

For every contender: tokens per step, step latency and speed-up against this engine's own
autoregressive loop, divergences, and how much its text repeats itself (text that runs in circles is
easy to guess).
"""

import sys
from collections.abc import Iterator, Sequence
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
from medusa_jax.console import entries
from medusa_jax.evaluate.questions import DEMO_PROMPTS, all_asked, read_prompts, spread
from medusa_jax.evaluate.tables import Cell, device_facts, write_report
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api import Model, Options
    from medusa_jax.evaluate.race import Contender

EXAMPLES = """examples:
  python -m medusa_jax bench
  python -m medusa_jax bench --drafters hydra,medusa --trees auto,64 --limit 8
  python -m medusa_jax bench --drafters medusa@8,prompt_lookup@chain:3 --limit 16
  python -m medusa_jax bench --model path/to/model --drafters path/to/heads,none \\
      --prompts question.jsonl
"""
COLUMNS: dict[str, Cell] = {
    "drafter": "{label}",
    "nodes": "{tree_nodes}",
    "mean accepted length": "{mean_accepted_length:.2f}",
    "step latency": "{step_latency_ratio:.2f}x",
    "speed-up": "{speedup:.2f}x",
    "with prefill": "{end_to_end_speedup:.2f}x",
    "tokens/s": "{tokens_per_second:.0f}",
    "diverged": "{divergences} of {texts}",
    "repeated 4-grams": "{repeated_4grams:.2f}",
}


@dataclass(frozen=True, kw_only=True)
class RaceFlags(GenerationFlags, BaseFlags):
    """What is raced, on which prompts."""

    prompts: str = flag(
        "JSONL with prompt or prompt_ids; or with messages, whose last user turn is answered, or turns "
        "(MT-bench, Spec-Bench: the first), through the chat template; or training data (default: the demo's)",
        str(DEMO_PROMPTS),
    )
    limit: int = flag(
        "most prompts, of all categories alike; 0 is all", 50, type=at_least(0)
    )
    drafters: str | None = flag(
        "comma-separated names, directories, files or hub ids, none for plain decoding (default: the "
        "model's own heads)",
        None,
    )
    repeats: int = flag("timed rounds; medians count", 3, type=at_least(1))
    out: str = flag("directory for results", "work/bench")


@dataclass(frozen=True, kw_only=True)
class TreeFlags(RaceFlags):
    """What is raced, on which prompts, with which trees."""

    trees: str = flag(
        "comma-separated --tree values (cartesian widths with x: cartesian:2x3)", "auto"
    )


@dataclass(frozen=True, kw_only=True)
class Flags(TreeFlags):
    """Compare drafters and trees with the autoregressive loop."""

    drafters: str | None = flag(
        "comma-separated names, directories, files or hub ids; NAME@TREE gives one a tree, none is plain "
        "decoding (default: all heads that come with the model, and prompt_lookup)",
        None,
    )


@dataclass(frozen=True)
class Entrant:
    """A drafter in the race.

    Attributes:
      name: as given.
      model: the backbone with this drafter; all entrants share one backbone.
      trees: --tree value -> tree.
    """

    name: str
    model: "Model"
    trees: dict[str, Tree]


def tree_specs(text: str) -> list[str]:
    """ "auto,cartesian:2x3" -> ["auto", "cartesian:2,3"]."""
    found = entries(text) or ["auto"]
    return [spec.replace("x", ",") if ":" in spec else spec for spec in found]


def default_names(model: str | None) -> list[str]:
    """All heads that come with the model, and the drafters that need none."""
    from medusa_jax.api.finding import bundled_draft_model, bundled_heads

    draft_model = ["draft_model"] if bundled_draft_model(model) else []
    return [*bundled_heads(model), *draft_model, "prompt_lookup"]


def names_of(flags: RaceFlags) -> list[str]:
    """--drafters, or the model's own heads."""
    from medusa_jax.api import default_drafter

    return entries(flags.drafters or "") or [default_drafter(flags.model)]


def load_entrants(flags: RaceFlags, names: Sequence[str], trees: str) -> Iterator[Entrant]:
    """The drafters, all on one copy of the backbone; `trees` for those named without one."""
    first: Model | None = None
    for each in names:
        name, _, own = each.partition("@")
        specs = tree_specs(own or trees)
        spec = "auto" if "auto" in specs else specs[0]
        model = load_model(flags, name, tree=spec)
        first = first or model
        model.variables = model.variables | {"backbone": first.variables["backbone"]}
        found = {s: model.tree if s == spec else model.parse_tree(s) for s in specs}
        yield Entrant(name, model, found)


def contenders_of(entrants: Sequence[Entrant], options: "Options") -> "list[Contender]":
    """Plain decoding, and every entrant with each of its trees."""
    from medusa_jax.evaluate.race import ourselves

    found = [ourselves(entrants[0].model, Tree.none(), options)]
    for e in entrants:
        for spec, tree in e.trees.items():
            label = e.model.drafts_by(tree) if tree.depth else e.name
            label += "" if spec == "auto" or spec.isdecimal() else f", {spec}"
            found.append(ourselves(e.model, tree, options, label=label))
    return found


def prompts_of(flags: RaceFlags) -> list[Json]:
    """--limit records of --prompts; the ids of the demo's are of its vocabulary, not of another model's."""
    records = spread(read_prompts(flags.prompts, messages=True), flags.limit)
    if flags.model and flags.prompts == str(DEMO_PROMPTS):
        return [{k: v for k, v in r.items() if not k.endswith("_ids")} for r in records]
    return records


def run(flags: Flags) -> int:
    """Race all drafters, all their trees and plain decoding; print the table, write the files."""
    from medusa_jax.evaluate.race import race

    records = prompts_of(flags)
    out, options = out_directory(flags.out), generation_options(flags)
    names = entries(flags.drafters or "") or default_names(flags.model)
    entrants = list(load_entrants(flags, names, flags.trees))
    model = entrants[0].model
    texts, options = all_asked(model, records, options)
    prompts = [model.encode(text) for text in texts]
    rows = race(contenders_of(entrants, options), prompts, flags.repeats)
    facts = device_facts() | {
        "dtype": str(model.dtype),
        "temperature": flags.temperature,
        "max_new_tokens": flags.max_new_tokens,
        "repeats": flags.repeats,
        "rows": rows,
    }
    notes = (
        f"autoregressive loop: {rows[0]['tokens_per_second']:.0f} tokens/s; "
        f"T {flags.temperature:g} ({facts['device']}, {facts['dtype']}, {facts['date']})"
    )
    write_report(out, "race", facts, rows, COLUMNS, notes)
    return 0


def out_directory(path: str, flag: str = "--out") -> Path:
    """A directory for results, created; compiled programs are kept on disk.

    Raises:
      UserError: it holds a model.
    """
    from medusa_jax.console import use_compilation_cache
    from medusa_jax.files.hub import refuse_model

    use_compilation_cache()
    refuse_model(path, flag)
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    return out


_bench = Program("python -m medusa_jax bench", Flags, run, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; `bench race` is the same command."""
    words = list(sys.argv[1:] if argv is None else argv)
    return _bench(words[words[:1] == ["race"] :])
