"""`python -m medusa_jax.compare_drafters`: train and measure drafters like for like.

On one frozen backbone, every drafter gets the same text, the same number of steps, the same
number of heads and kind of LM head, trees of the same size (fitted to its own ranks) and the same
verifier; its loss is that of its paper, as its configuration says. Every drafter is trained once
per seed. What is there is not done again, so a run that was stopped goes on where it was.

Measured: how often the true token is the first or among the first five guesses of each head, on
the backbone's own greedy text; mean accepted length and speed-up in decoding; the share of a step
that drafting takes; held-out accuracy over training. Written as JSON, as Markdown and as a plot.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.console import run_main, say
from medusa_jax.errors import UserError

DRAFTERS = "medusa,hydra,hydrapp,amphista,amphista_alpha"
CURVE_POINTS = 8
# Orders that the papers report for the mean accepted length.
ORDERS = (("medusa", "hydra", "hydrapp"), ("medusa", "amphista", "amphista_alpha"))
EXAMPLES = """examples (from the project's root, after `python -m medusa_jax.demo.build`):
  python -m medusa_jax.distill --model medusa_jax/demo/backbone --temperature 0 \\
      --prompts work/demo/calibration.jsonl --out work/demo/answers_apart   (held-out answers)
  python -m medusa_jax.compare_drafters --model medusa_jax/demo/backbone \\
      --data work/demo/answers --eval_data work/demo/answers_apart \\
      --calibration work/demo/calibration.jsonl --steps 600 --out work/family
  python -m medusa_jax.compare_drafters ... --config.optim.lr=1e-3    (for every training)
"""


def parser() -> argparse.ArgumentParser:
    """All flags; anything of the form --config.field=value goes to every training."""
    p = argparse.ArgumentParser(
        prog="python -m medusa_jax.compare_drafters",
        description="Train and measure drafters like for like on one backbone.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--model", required=True, help="directory of the backbone")
    p.add_argument("--data", required=True, help="training text (data.source)")
    p.add_argument("--eval_data", default="", help="held-out text for the curves")
    p.add_argument("--calibration", required=True, help="JSONL of prompts to fit trees on")
    p.add_argument("--prompts", default=str(Path(__file__).parent / "demo/prompts.jsonl"),
                   help="JSONL of prompts to decode (not those of --calibration)")  # fmt: skip
    p.add_argument("--drafters", default=DRAFTERS)
    p.add_argument(
        "--recipe", default="demo", help="configs/{recipe}_{drafter}.py are used"
    )
    p.add_argument("--only", action="append", default=[], metavar="DRAFTER:FIELD=VALUE",
                   help="a field for one drafter, such as medusa:heads.n_layers=2")  # fmt: skip
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--n_heads", type=int, default=4)
    p.add_argument("--lm_head", default="low_rank", help="own, shared or low_rank, for all")
    p.add_argument("--rank", type=int, default=64)
    p.add_argument("--nodes", default="8,64", help="tree sizes, root included")
    p.add_argument("--limit", type=int, default=32, help="most prompts of either file")
    p.add_argument("--max_new_tokens", type=int, default=200)
    p.add_argument("--repeats", type=int, default=3, help="timed runs per prompt")
    p.add_argument("--out", default="work/family", help="directory for everything")
    return p


def train_one(
    flags: argparse.Namespace, extra: Sequence[str], name: str, seed: int
) -> Path:
    """Train a drafter unless its result is there; returns the directory of the run.

    Raises:
      UserError: the training ended without a result.
    """
    from medusa_jax.cli import train

    run = Path(flags.out) / f"{name}-s{seed}"
    done = run / "export" / "heads.safetensors"
    if done.exists():
        say(f"{name}, seed {seed}: {done} is there, not trained again")
        return run
    arguments = [
        f"--config=configs/{flags.recipe}_{name}.py", f"--workdir={run}",
        f"--config.model.path={flags.model}", f"--config.data.source={flags.data}",
        f"--config.data.eval_source={flags.eval_data}", f"--config.data.seed={seed}",
        f"--config.train.seed={seed}", f"--config.train.steps={flags.steps}",
        f"--config.heads.n_heads={flags.n_heads}", f"--config.heads.lm_head={flags.lm_head}",
        f"--config.heads.rank={flags.rank}",
        # One cache of hidden states for all of them.
        "--config.data.cache_features=float32",
        f"--config.data.features_path={flags.out}/features",
        f"--config.train.eval_every={max(flags.steps // CURVE_POINTS, 1)}",
        f"--config.train.save_every={max(flags.steps // 2, 1)}", *extra,
        *(f"--config.{f}" for who, _, f in (x.partition(":") for x in flags.only) if who == name),
    ]  # fmt: skip
    say(f"{name}, seed {seed}: train.py {' '.join(arguments)}")
    if train.main(arguments) or not done.exists():
        raise UserError(f"training {name} with seed {seed} failed; its command is above")
    return run


def draft_seconds(model: Any, tree: Any, n_steps: int = 50, rounds: int = 7) -> float:
    """Median seconds of one commit and propose, all on the device, batch 1.

    Every iteration reads what the one before drafted, so that no part of it can be moved out
    of the loop.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    drafter, dtype, L = model.drafter, model.dtype, tree.path_length
    V = model.config.vocab_size

    @jax.jit
    def many(variables: Any, hidden_1LD: jax.Array) -> jax.Array:
        from medusa_jax.heads import Base

        base = Base(model.llama, variables["base"])

        def one(i: jax.Array, carry: Any) -> Any:
            state, nodes_1M = carry
            ids_1L = jnp.broadcast_to(nodes_1M[:, -1:], (1, L)) % V
            moved = hidden_1LD * (1 + 1e-6 * ids_1L[..., None].astype(dtype))
            position_1L = i + jnp.arange(L)[None, :]
            rows = (moved.astype(dtype), ids_1L, position_1L, jnp.ones((1,), jnp.int32))
            state = drafter.commit(variables["heads"], base, state, *rows)
            nodes = drafter.propose(
                variables["heads"], base, state, ids_1L[:, 0], tree, lambda depth, x: x
            )
            return state, nodes.astype(jnp.int32)

        start = drafter.start(1, 2 * n_steps + L, dtype)
        first = jnp.zeros((1, tree.n_nodes), jnp.int32)
        return lax.fori_loop(0, n_steps, one, (start, first))[1]

    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((1, L, model.config.d_model)), dtype)
    many(model.variables, hidden).block_until_ready()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        many(model.variables, hidden).block_until_ready()
        times.append((time.perf_counter() - begin) / n_steps)
    return statistics.median(times)


def measure_one(flags: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Accuracies, accepted lengths and times of one trained drafter, kept in measured.json."""
    import jax

    from medusa_jax.api import load
    from medusa_jax.bench import bench_row, read_questions
    from medusa_jax.calibrate import collect_tuples
    from medusa_jax.decoding import calibrate as fit
    from medusa_jax.decoding.latency import step_seconds
    from medusa_jax.tree import Tree

    settings = {name: getattr(flags, name) for name in
                ("model", "calibration", "prompts", "nodes", "limit", "max_new_tokens", "repeats")}  # fmt: skip
    kept = run / "measured.json"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        if found["settings"] == settings:
            say(f"{kept} is there, not measured again")
            return found
    model = load(flags.model, str(run / "export"), tree="none")
    questions = read_questions(flags.prompts, flags.limit)
    fitted = read_questions(flags.calibration, flags.limit)
    prompts: list[Any] = [q.get("prompt_ids", q.get("prompt")) for q in fitted]
    texts = collect_tuples(model, prompts, flags.max_new_tokens, 0.0)
    tuples_NK = np.concatenate(texts)
    bench_flags = argparse.Namespace(
        max_new_tokens=flags.max_new_tokens, temperature=0.0, seed=0, repeats=flags.repeats
    )
    decoded = []
    for size in (int(n) for n in flags.nodes.split(",")):
        tree = Tree.from_choices(fit.joint_growth(tuples_NK, size - 1))
        row = bench_row(model, questions, tree, bench_flags)
        [step] = step_seconds(model, [tree], model.encode(prompts[0]))
        draft = draft_seconds(model, tree)
        names = (
            "mean_accepted_length",
            "speedup",
            "step_latency_ratio",
            "divergences",
            "prompts",
        )
        decoded.append(
            {"nodes": tree.n_nodes, "choices": [list(c) for c in tree.choices]}
            | {name: row[name] for name in names}
            | {"step_seconds": step, "draft_seconds": draft, "draft_share": draft / step}
        )  # fmt: skip
    found = {
        "settings": settings,
        "drafter": model.drafter.heads.drafter,
        "parameters": sum(x.size for x in jax.tree.leaves(model.variables["heads"])),
        "top1": (tuples_NK == 0).mean(axis=0).tolist(),
        "top5": (tuples_NK < 5).mean(axis=0).tolist(),
        "positions": len(tuples_NK),
        "decoded": decoded,
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
    }
    kept.write_text(json.dumps(found, indent=1) + "\n")
    return found


def race(
    flags: argparse.Namespace, where: dict[str, list[Path]], runs: dict[str, list[Any]]
) -> dict[str, list[dict[str, float]]]:
    """Speed of every drafter's first seed, per tree size: all of them in turn on each prompt.

    Times taken minutes apart do not compare on a machine with neighbours. Per prompt, each
    drafter and tree and plain decoding is run `--repeats` times, round by round; medians count.
    """
    from tqdm import tqdm

    from medusa_jax.api import Options, load
    from medusa_jax.bench import prompt_of, read_questions
    from medusa_jax.tree import Tree

    options = Options(max_new_tokens=flags.max_new_tokens)
    plain = ("", 0)
    entries: dict[tuple[str, int], tuple[Any, Tree]] = {}
    for name, paths in where.items():
        model = load(flags.model, str(paths[0] / "export"), tree="none")
        entries.setdefault(plain, (model, Tree.none()))
        for row in runs[name][0]["decoded"]:
            entries[name, row["nodes"]] = (model, Tree.from_choices(row["choices"]))
    seconds = dict.fromkeys(entries, 0.0)
    steps, tokens = dict.fromkeys(entries, 0), dict.fromkeys(entries, 0)
    questions = read_questions(flags.prompts, flags.limit)
    for question in tqdm(questions, desc="in turn", unit="prompt", disable=None):
        rounds: dict[tuple[str, int], list[Any]] = {entry: [] for entry in entries}
        for _ in range(max(flags.repeats, 1)):
            for entry, (model, tree) in entries.items():
                rounds[entry] += model.generate([prompt_of(question)], options, tree=tree)
        for entry, results in rounds.items():
            seconds[entry] += statistics.median(r.decode_seconds for r in results)
            steps[entry] += results[0].steps
            tokens[entry] += results[0].new_tokens - 1
    found: dict[str, list[dict[str, float]]] = {name: [] for name in where}
    for entry in list(entries)[1:]:
        speedup = (seconds[plain] / tokens[plain]) / (seconds[entry] / tokens[entry])
        latency = (seconds[entry] / steps[entry]) / (seconds[plain] / steps[plain])
        found[entry[0]].append(
            {"nodes": entry[1], "speedup": speedup, "step_latency_ratio": latency}
        )
    return found


def curve(run: Path) -> list[dict[str, Any]]:
    """Held-out records of a training, in order: step, top1 per head."""
    file = run / "log.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines]
    return [
        {"step": r["step"], "top1": r["top1"]} for r in records if r.get("kind") == "eval"
    ]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and, of several, sample standard deviation: "2.31 ± 0.02"."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def table(
    runs: dict[str, list[dict[str, Any]]], speeds: dict[str, list[dict[str, float]]]
) -> str:
    """All runs as Markdown: tables of heads, of decoding per tree size, of speed.

    Args:
      runs: per drafter what `measure_one` found for each seed.
      speeds: what `race` found.
    """
    lines = [
        "| drafter | parameters | top-1 by head | top-5 by head |",
        "|---|---|---|---|",
    ]
    for name, found in runs.items():
        tops = [
            " ".join(f"{x:.3f}" for x in np.mean([f[top] for f in found], axis=0))
            for top in ("top1", "top5")
        ]
        lines.append(
            f"| {name} | {found[0]['parameters'] / 1e6:.2f} M | {tops[0]} | {tops[1]} |"
        )
    lines += [
        "",
        "| drafter | nodes | mean accepted length | drafting, share of a step | diverged |",
        "|---|---|---|---|---|",
    ]
    for i in range(len(next(iter(runs.values()))[0]["decoded"])):
        for name, found in runs.items():
            rows = [f["decoded"][i] for f in found]
            keys = ("mean_accepted_length", "draft_share", "divergences", "prompts")
            several = {key: [r[key] for r in rows] for key in keys}
            lines.append(
                f"| {name} | {rows[0]['nodes']} | {spread(several['mean_accepted_length'], 3)} "
                f"| {spread([100 * x for x in several['draft_share']], 1)}% "
                f"| {sum(several['divergences'])} of {sum(several['prompts'])} |"
            )
    lines += ["", "| drafter (first seed, all in turn) | nodes | step latency | speed-up |",
              "|---|---|---|---|"]  # fmt: skip
    for i in range(len(next(iter(speeds.values())))):
        lines += [
            f"| {name} | {found[i]['nodes']} | {found[i]['step_latency_ratio']:.2f}x "
            f"| {found[i]['speedup']:.2f}x |"
            for name, found in speeds.items()
        ]
    return "\n".join(lines)


def orders(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Whether the mean accepted lengths stand in the papers' order, per tree size."""
    lines = []
    for order in ORDERS:
        names = [name for name in order if name in runs]
        for i in range(len(next(iter(runs.values()))[0]["decoded"])):
            lengths = [
                [f["decoded"][i]["mean_accepted_length"] for f in runs[name]]
                for name in names
            ]
            if len(names) < 2:
                continue
            means = [statistics.mean(x) for x in lengths]
            holds = all(a < b for a, b in itertools.pairwise(means))
            seeds = sum(all(a < b for a, b in itertools.pairwise(x)) for x in zip(*lengths))
            nodes = runs[names[0]][0]["decoded"][i]["nodes"]
            lines.append(
                f"{' < '.join(names)} with {nodes} nodes: {'holds' if holds else 'does not hold'} "
                f"for the means, and in {seeds} of {len(lengths[0])} seeds"
            )
    return "\n".join(lines)


def claim(
    runs: dict[str, list[dict[str, Any]]], speeds: dict[str, list[dict[str, float]]]
) -> str:
    """Amphista's central claim (its table 2): it accepts less than Hydra++ and is yet faster."""
    if not {"amphista", "hydrapp"} <= runs.keys():
        return ""
    lines = []
    for i, row in enumerate(runs["amphista"][0]["decoded"]):
        ours, theirs = (
            statistics.mean(f["decoded"][i]["mean_accepted_length"] for f in runs[name])
            for name in ("amphista", "hydrapp")
        )
        faster = speeds["amphista"][i]["speedup"] / speeds["hydrapp"][i]["speedup"]
        holds = "holds" if ours < theirs and faster > 1 else "does not hold"
        lines.append(
            f"amphista against hydrapp with {row['nodes']} nodes: {ours / theirs - 1:+.1%} in "
            f"accepted length, {faster - 1:+.1%} in speed: the claim {holds} here"
        )
    return "\n".join(lines)


def run(flags: argparse.Namespace, extra: Sequence[str]) -> int:
    """Train, measure, write."""
    from medusa_jax import plots
    from medusa_jax.console import use_compilation_cache

    if not os.path.exists("train.py"):
        raise UserError("run this from the project's root, where train.py is")
    try:
        sizes = [int(n) for n in flags.nodes.split(",")]
    except ValueError as error:
        raise UserError(f"--nodes is a list like 8,64, not {flags.nodes!r}") from error
    if min(sizes) < 2 or flags.seeds < 1:
        raise UserError("--nodes must be at least 2 and --seeds at least 1")
    use_compilation_cache()
    names = flags.drafters.split(",")
    for given in flags.only:
        if given.partition(":")[0] not in names:
            raise UserError(f"--only {given}: the drafters are {', '.join(names)}")
    for name in names:
        if not os.path.exists(f"configs/{flags.recipe}_{name}.py"):
            raise UserError(
                f"there is no configs/{flags.recipe}_{name}.py for --drafters {name}"
            )
    # All trainings first: what is measured should be measured in one go.
    where = {n: [train_one(flags, extra, n, s) for s in range(flags.seeds)] for n in names}
    runs = {name: [measure_one(flags, path) for path in where[name]] for name in names}
    curves = {name: [curve(path) for path in where[name]] for name in names}
    speeds = race(flags, where, runs)
    text = f"{table(runs, speeds)}\n\n{orders(runs)}\n{claim(runs, speeds)}\n"
    out = Path(flags.out)
    (out / "family.json").write_text(
        json.dumps(
            {
                "runs": runs,
                "speeds": speeds,
                "curves": curves,
                "extra": list(extra),
                "only": flags.only,
            },
            indent=1,
        )
        + "\n"
    )
    (out / "family.md").write_text(text)
    print(text)
    plots.draw_drafters(runs, speeds, curves, out / "family.png")
    say(f"wrote {out}/family.md, family.json and family.png")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    flags, extra = parser().parse_known_args(argv)

    def go() -> int:
        wrong = [x for x in extra if not x.startswith("--config.")]
        if wrong:
            raise UserError(f"unknown flag {wrong[0]} (see --help)")
        return run(flags, extra)

    return run_main(go)


if __name__ == "__main__":
    sys.exit(main())
