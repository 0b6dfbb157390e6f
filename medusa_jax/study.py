"""`python -m medusa_jax.study`: what each training recipe costs in quality and brings in length.

The shape of the paper's table 2 on a small backbone. All arms train with the same number of
steps on text unlike the backbone's own (the README texts of the installed packages), so quality
can be lost. An arm is measured by

    perplexity   of the original's held-out text
    agreement    share of its positions where the trained backbone's most likely next token is
                 still the original's (teacher-forced)
    accepted     mean accepted length of greedy decoding, one tree for all arms, on prompts from
                 the new text and from the original's

Finished runs leave a result.json and are not repeated, so the command can be stopped at will.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.cli.flags import command, run_command
from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from medusa_jax.console import say, use_compilation_cache
from medusa_jax.errors import UserError

DEMO = Path(__file__).parent / "demo" / "backbone"
EXAMPLES = """examples:
  python -m medusa_jax.study --original work/demo/heldout --out work/study
  python -m medusa_jax.study --original work/demo/heldout --out work/study \\
      --steps 40 --seeds 1 --arms baseline,medusa1,medusa2   (a quick look)
"""
HEADS_RATE, BACKBONE_RATE = 2e-3, 5e-4  # the paper's two-stage recipe


def arms() -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Name -> (what it is, its runs one after another as fields that differ from `recipe`).

    A run's "share" is its part of all steps; "heads" is the run whose heads it starts from.
    """
    lora = {"lora.rank": 32, "train.stage": "medusa2"}
    joint = lora | {"optim.lr": BACKBONE_RATE, "train.lambda_0": 0.2}
    first = {"train.stage": "medusa1", "optim.lr": HEADS_RATE, "share": 0.5}
    second = joint | {"share": 0.5, "heads": 0}
    heads = {"train.stage": "medusa1", "optim.lr": HEADS_RATE, "share": 1.0}
    direct = lora | {
        "optim.lr": HEADS_RATE, "optim.heads_lr_multiplier": 1.0, "train.lambda_0": 1.0,
        "share": 1.0,
    }  # fmt: skip
    return {
        "baseline": ("the backbone as it is", []),
        "direct": ("backbone and heads at one rate, fresh heads, lambda_0 = 1", [direct]),
        "medusa1": ("heads alone", [heads]),
        "medusa2": ("two stages: heads, then both (lambda_0 = 0.2, rates 1 : 4)", [first, second]),
        "medusa2-sine": (
            "both from the start, lambda_0 rising to 0.2 as a sine",
            [joint | {"share": 1.0, "train.lambda_0_schedule": "sine"}],
        ),
        "medusa2-kl": (
            "two stages, KL to the original in place of the labels",
            [first, second | {"train.backbone_loss": "kl"}],
        ),
        "medusa1-self": (
            "heads alone, on the backbone's own continuations",
            [heads | {"data": "self"}],
        ),
        "medusa1-nf4": ("heads alone, on a 4-bit backbone", [heads | {"model.quantise": "nf4"}]),
        "medusa1-8bit": (
            "heads alone, AdamW with 8-bit moments",
            [heads | {"optim.name": "adamw8bit"}],
        ),
    }  # fmt: skip


def recipe(flags: argparse.Namespace, seed: int, data: Path) -> Config:
    """What all arms share."""
    return Config(
        model=ModelConfig(path=flags.model),
        heads=HeadsConfig(n_heads=4, n_layers=1, lm_head="low_rank", rank=flags.rank),
        data=DataConfig(
            source=str(data), format="tokens", seq_len=flags.length, packing="first_fit", seed=seed
        ),
        optim=OptimConfig(warmup_steps=20, schedule="cosine"),
        lora=LoraConfig(rank=0),
        train=TrainConfig(
            batch_size=flags.batch_size, dtype=flags.dtype, remat=False, loss_chunk=128,
            log_every=20, save_every=10**9, keep_checkpoints=1, seed=seed,
        ),
        mesh=(1, 1, 1),
    )  # fmt: skip


# --------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------


def new_text() -> list[str]:
    """README texts of the installed packages, in the order of their names."""
    texts = {}
    for package in metadata.distributions():
        body = (package.read_text("METADATA") or "").partition("\n\n")[2]
        if len(body) > 500:
            texts[package.metadata["Name"].lower()] = body
    return [texts[name] for name in sorted(texts)]


def write_tokens(directory: Path, pieces: Sequence[np.ndarray], prompt: int = 0) -> None:
    """A token directory of pieces; the first `prompt` tokens of each are not targets."""
    directory.mkdir(parents=True, exist_ok=True)
    lengths = [len(p) for p in pieces]
    counted = [np.arange(n) >= prompt for n in lengths]
    np.save(directory / "doc_starts.npy", np.cumsum([0, *lengths[:-1]], dtype=np.int64))
    np.save(directory / "counted.npy", np.concatenate(counted))
    np.save(directory / "tokens.npy", np.concatenate(pieces).astype(np.int32))


def prepare_text(flags: argparse.Namespace, model: Any, out: Path) -> list[list[int]]:
    """Writes `new/` and `self/` (token directories); returns prompts of the new text, apart.

    The text is cut into pieces of `--length` tokens, every tenth is held out. `self/` holds the
    same pieces' first quarters, continued by the backbone itself at temperature 0.3.
    """
    from medusa_jax.api.results import Options

    T, prompt = flags.length, flags.length // 4
    pieces: list[np.ndarray] = []
    for text in new_text():
        ids = np.array(model.tokenizer.encode(text), np.int32)
        pieces += [ids[i : i + T] for i in range(0, len(ids) - T + 1, T)]
    if len(pieces) < 40:
        raise UserError("too few installed packages have a README to make a new text of")
    apart = pieces[::10]
    train = [p for i, p in enumerate(pieces) if i % 10]
    train = [train[i] for i in np.random.default_rng(0).permutation(len(train))]
    if not (out / "new" / "tokens.npy").exists():
        write_tokens(out / "new", train)
    if not (out / "self" / "tokens.npy").exists():
        say(f"the backbone continues {min(flags.distill, len(train))} prompts itself")
        own = []
        for first in range(0, min(flags.distill, len(train)), 32):
            prompts = [p[:prompt].tolist() for p in train[first : first + 32]]
            options = Options(max_new_tokens=T - prompt, temperature=0.3, seed=first)
            answers = model.generate(prompts, options, tree="none")
            own += [np.array(p + a.token_ids) for p, a in zip(prompts, answers)]
        write_tokens(out / "self", own, prompt)
    return [p[:prompt].tolist() for p in apart[: flags.prompts]]


def old_prompts(rows: Any, n: int) -> list[list[int]]:
    """Openings of rows of the original's held-out text."""
    return [
        row[: row.size // 4].tolist() for row in rows.batch(0, min(n, rows.rows))["tokens"]
    ]


# --------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------


def make_judge(rows: Any, limit: int) -> Callable[[Any, Any], tuple[float, np.ndarray]]:
    """(configuration, parameters) -> (perplexity, most likely next tokens) of the held-out rows."""
    import jax
    import jax.numpy as jnp

    from medusa_jax.heads import Base
    from medusa_jax.model.llama import Llama
    from medusa_jax.training import losses

    batches = [rows.batch(i, 8) for i in range(0, min(limit, rows.rows) - 7, 8)]
    if not batches:
        raise UserError("the held-out text has fewer than 8 rows")

    def judge(config: Any, params: Any) -> tuple[float, np.ndarray]:
        @jax.jit
        def one(params: Any, batch: Any) -> Any:
            base = Base(Llama(config), params)
            logits = base.lm_head(base.forward(*losses.rows(batch)))
            mask = losses.pair_mask(batch["counted"], batch["segment_ids"], 1)
            label = losses.shift(batch["tokens"], 1)[..., None]
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), label, -1)[..., 0]
            return jnp.sum(logp * mask), jnp.sum(mask), jnp.argmax(logits, -1), mask

        total, count, best = 0.0, 0, []
        for batch in batches:
            logp, n, argmax, mask = one(params, batch)
            total, count = total + float(logp), count + int(n)
            best.append(np.asarray(argmax)[np.asarray(mask)])
        return float(np.exp(-total / count)), np.concatenate(best)

    return judge


def accepted(model: Any, prompts: list[list[int]], tree: str, n_new: int) -> float:
    """Tokens appended per step over all prompts, greedy, in batches of 8."""
    from medusa_jax.api.results import Options

    appended = steps = 0
    for first in range(0, len(prompts), 8):
        part = prompts[first : first + 8]
        for result in model.generate(part, Options(max_new_tokens=n_new), tree=tree):
            steps += result.steps
            histogram = result.acceptance_histogram
            appended += sum((i + 1) * n for i, n in enumerate(histogram))
    return appended / max(steps, 1)


def train_arm(
    flags: argparse.Namespace,
    seed: int,
    runs: list[dict[str, Any]],
    folder: Path,
    out: Path,
) -> tuple[str, str, float]:
    """Runs of one arm -> (model directory, heads directory, last mean loss of the heads)."""
    from medusa_jax.cli.train import override
    from medusa_jax.training.trainer import train

    done: list[tuple[str, str]] = []
    last: dict[str, Any] = {}
    for number, fields in enumerate(runs):
        cfg = recipe(flags, seed, out / fields.get("data", "new"))
        cfg.workdir = str(folder / f"run{number}")
        cfg.train.steps = max(int(flags.steps * fields["share"]), 2)
        for name, value in fields.items():
            if "." in name:
                override(cfg, name, str(value))
        if cfg.train.stage == "medusa1":
            # Runs on the frozen backbone share its hidden states, whatever their seed.
            cfg.data.cache_features = "float32"
            cfg.data.features_path = str(out / "features")
        if "heads" in fields:
            cfg.train.heads_path = done[fields["heads"]][1]
        os.makedirs(cfg.workdir, exist_ok=True)
        last = train(cfg) or last
        export = f"{cfg.workdir}/export"
        both = os.path.exists(f"{export}/config.json")
        done.append((export, f"{export}/heads") if both else (flags.model, export))
    loss = float(np.mean(last["loss"])) if last else float("nan")
    return (*done[-1], loss)


def study(flags: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All arms and seeds; returns their figures, which are also in the result files."""
    from medusa_jax.api.load import load
    from medusa_jax.training.data import TokenRows

    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    names = flags.arms.split(",") if flags.arms else list(arms())
    if unknown := [n for n in names if n not in arms()]:
        raise UserError(f"unknown arm {unknown[0]!r}: there are {', '.join(arms())}")
    original = load(flags.model, "none", dtype=flags.dtype, tree="none")
    layout = DataConfig(seq_len=flags.length, packing="concat")
    rows = TokenRows(flags.original, layout, original.config.vocab_size, shuffle=False)
    new = prepare_text(flags, original, out)
    old = old_prompts(rows, flags.prompts)
    judge = make_judge(rows, flags.rows)
    from medusa_jax.interop import hf
    from medusa_jax.sharding import make_mesh

    def quality(path: str) -> tuple[float, np.ndarray]:
        return judge(*hf.load_backbone(path, make_mesh()))

    perplexity, reference = quality(flags.model)
    figures: dict[str, list[dict[str, float]]] = {}
    for name in names:
        runs = arms()[name][1]
        for seed in range(flags.seeds if runs else 1):
            folder = out / f"{name}-{seed}"
            file = folder / "result.json"
            if file.exists():
                figures.setdefault(name, []).append(json.loads(file.read_text()))
                continue
            row = {"perplexity": perplexity, "agreement": 1.0}
            row |= {"accepted_new": 1.0, "accepted_old": 1.0}
            if runs:
                say(f"--- {name}, seed {seed}")
                path, heads, loss = train_arm(flags, seed, runs, folder, out)
                ppl, best = quality(path)
                row = {"perplexity": ppl, "agreement": float(np.mean(best == reference))}
                model = load(
                    path, heads, dtype=flags.dtype, tree=flags.tree, tokenizer=flags.model
                )
                row["accepted_new"] = accepted(model, new, flags.tree, flags.new_tokens)
                row["accepted_old"] = accepted(model, old, flags.tree, flags.new_tokens)
                row["heads_loss"] = loss
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(row))
            figures.setdefault(name, []).append(row)
        (out / "table.md").write_text(table(flags, figures))
    return figures


def table(flags: argparse.Namespace, figures: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: mean and standard deviation over the seeds."""
    columns = ("perplexity", "agreement", "accepted_new", "accepted_old", "heads_loss")

    def cell(rows: list[dict[str, float]], column: str) -> str:
        values = [row[column] for row in rows if column in row]
        if not values:
            return "-"
        spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
        return f"{np.mean(values):.3f}{spread}"

    lines = [
        f"{flags.steps} steps of {flags.batch_size} x {flags.length} tokens per arm, {flags.seeds} seeds "
        f"(mean ± standard deviation), tree {flags.tree}, greedy.",
        "",
        "| arm | what | perplexity (original text) | greedy agreement | accepted, new text | "
        "accepted, original text | heads' last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in figures.items():
        cells = " | ".join(cell(rows, column) for column in columns)
        lines.append(f"| {name} | {arms()[name][0]} | {cells} |")
    return "\n".join(lines) + "\n"


def loss_curve(out: Path, arm: str, seeds: int) -> tuple[list[int], list[float]]:
    """Steps and training losses (mean over heads and seeds) of an arm of one run."""
    runs = []
    for seed in range(seeds):
        lines = (out / f"{arm}-{seed}" / "run0" / "log.jsonl").read_text().splitlines()
        kept = [r for r in map(json.loads, lines) if r["kind"] == "train"]
        runs.append({r["step"]: float(np.mean(r["loss"])) for r in kept})
    steps = sorted(set.intersection(*[set(run) for run in runs]))
    return steps, [float(np.mean([run[step] for run in runs])) for step in steps]


def draw(out: Path, names: Sequence[str], seeds: int) -> None:
    """curves.png: the losses of arms that train heads alone on the new text."""
    from medusa_jax.plots import Chart, draw_lines

    alike = [n for n in names if [r.get("share") for r in arms()[n][1]] == [1.0]]
    alike = [n for n in alike if n.startswith("medusa1") and "self" not in n]
    if alike:
        lines = {name: loss_curve(out, name, seeds) for name in alike}
        draw_lines([Chart("training loss, mean of the heads", "step", lines)],
                   path=out / "curves.png")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command("python -m medusa_jax.study", "Compare training recipes.", EXAMPLES)
    p.add_argument("--original", required=True,
                   help="token directory of held-out text of the backbone's own kind")  # fmt: skip
    p.add_argument("--out", required=True, help="results, runs and table.md go there")
    p.add_argument("--model", default=str(DEMO), help="backbone (default: the demo's)")
    p.add_argument("--arms", default="", help=f"default all: {','.join(arms())}")
    p.add_argument("--steps", type=int, default=300, help="per arm (default: 300)")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--batch_size", type=int, default=4)
    p.add_argument("--length", type=int, default=256, help="tokens per row (default: 256)")
    p.add_argument(
        "--rank", type=int, default=64, help="of the heads' LM heads (default: 64)"
    )
    p.add_argument("--distill", type=int, default=640, help="continuations for self/")
    p.add_argument("--prompts", type=int, default=16, help="prompts of either text")
    p.add_argument("--new_tokens", type=int, default=96)
    p.add_argument("--rows", type=int, default=64, help="held-out rows that are judged")
    p.add_argument("--tree", default="cartesian:4,2,1,1")
    p.add_argument("--dtype", default="float32")
    return p


def run(flags: argparse.Namespace) -> int:
    """Everything, then the table on standard output."""
    if not os.path.isfile(os.path.join(flags.original, "tokens.npy")):
        raise UserError(
            f"{flags.original} has no tokens.npy; for the demo: python -m "
            "medusa_jax.demo.corpus --out work/demo makes work/demo/heldout"
        )
    use_compilation_cache()  # arms and seeds share most programs
    figures = study(flags)
    draw(Path(flags.out), list(figures), flags.seeds)
    print(table(flags, figures), end="")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
