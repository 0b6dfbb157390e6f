"""The study's figures: quality, agreement, accepted length; the table and the curves."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.config import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Run
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.heads.drafter import shift_left
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.plots import Chart, draw_lines
from medusa_jax.sharding import Params, PyTree
from medusa_jax.training.data.rows import Rows
from medusa_jax.training.losses.pairs import Batch, pair_mask, text_of
from medusa_jax.training.run_log import read_log
from research.family.report import spread
from research.recipes.variants import Study, variants

# (configuration, parameters) -> (perplexity, most likely next tokens).
Judge = Callable[[LlamaConfig, Params], tuple[float, np.ndarray]]


def make_judge(rows: Rows, limit: int) -> Judge:
    """The judge of a backbone on held-out rows."""
    batches = [rows.batch(range(i, i + 8)) for i in range(0, min(limit, rows.rows) - 7, 8)]
    if not batches:
        raise UserError("the held-out text has fewer than 8 rows")

    def judge(config: LlamaConfig, params: Params) -> tuple[float, np.ndarray]:
        @jax.jit
        def one(params: Params, batch: Batch) -> PyTree:
            backbone = Backbone(Llama(config), params)
            logits = backbone.lm_head(backbone.forward(*text_of(batch)))
            mask = pair_mask(batch["counted"], batch["segment_ids"], 1)
            label = shift_left(batch["tokens"], 1)[..., None]
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), label, -1)[..., 0]
            return jnp.sum(logp * mask), jnp.sum(mask), jnp.argmax(logits, -1), mask

        total, count, best = 0.0, 0, []
        for batch in batches:
            logp, n, argmax, mask = one(params, batch)
            total, count = total + float(logp), count + int(n)
            best.append(np.asarray(argmax)[np.asarray(mask)])
        return float(np.exp(-total / count)), np.concatenate(best)

    return judge


def accepted(model: Model, prompts: list[list[int]], tree: str, n_new: int) -> float:
    """Tokens appended per step over all prompts, greedy, in batches of 8."""
    options = Options(max_new_tokens=n_new)
    parts = [prompts[i : i + 8] for i in range(0, len(prompts), 8)]
    runs = [Run.of(model.generate(part, options, tree=tree)) for part in parts]
    return sum(run.appended for run in runs) / max(sum(run.steps for run in runs), 1)


def recipe_table(study: Study, figures: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: mean and standard deviation over the seeds."""
    columns = ("perplexity", "agreement", "accepted_new", "accepted_old", "heads_loss")

    def cell(rows: list[dict[str, float]], column: str) -> str:
        values = [row[column] for row in rows if column in row]
        return spread(values, 3) if values else "-"

    about = (
        f"{study.steps} steps of {study.batch_size} x {study.length} tokens per variant, {study.seeds} seeds "
        f"(mean ± standard deviation), tree {study.tree}, greedy."
    )
    header = (
        "variant", "what", "perplexity (original text)", "greedy agreement", "accepted, new text",
        "accepted, original text", "heads' last loss",
    )  # fmt: skip
    cells = [
        (name, variants()[name][0], *(cell(rows, column) for column in columns))
        for name, rows in figures.items()
    ]
    return f"{about}\n\n{markdown_table(header, cells)}\n"


def loss_curve(out: Path, variant: str, seeds: int) -> tuple[list[int], list[float]]:
    """Steps and training losses (mean over heads and seeds) of a variant of one run."""
    runs = []
    for seed in range(seeds):
        log = read_log(out / f"{variant}-{seed}" / "run0" / "log.jsonl")
        records = [r for r in log if r["kind"] == "train"]
        runs.append({r["step"]: float(np.mean(r["loss"])) for r in records})
    steps = sorted(set.intersection(*[set(run) for run in runs]))
    return steps, [float(np.mean([run[step] for run in runs])) for step in steps]


def draw(out: Path, names: Sequence[str], seeds: int) -> None:
    """Draw curves.png: the losses of variants that train only heads on the new text."""
    comparable = [n for n in names if [r.get("share") for r in variants()[n][1]] == [1.0]]
    comparable = [n for n in comparable if n.startswith("medusa1") and "self" not in n]
    if comparable:
        lines = {name: loss_curve(out, name, seeds) for name in comparable}
        draw_lines([Chart("training loss, mean of the heads", "step", lines)],
                   path=out / "curves.png")  # fmt: skip
