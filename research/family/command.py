"""`python -m research family`: train and measure drafters under identical conditions.

On one frozen backbone, every drafter gets the same text, the same number of steps, the same number of
heads and kind of LM head, trees of the same size (fitted to its ranks) and the same verifier. Its loss
is that of its paper (`LOSSES`), all else comes from its configuration. Every drafter is trained once
per seed. Finished parts are skipped, so a stopped run resumes where it was.

Measured are: top-1 and top-5 accuracy of each head on the backbone's greedy text; mean accepted length
and speed-up in decoding; the share of a step spent on drafting; held-out accuracy over training. The
results are written as JSON, Markdown and a plot.
"""

import dataclasses
import json
import os
from pathlib import Path

from medusa_jax.commands import train
from medusa_jax.commands.flags import at_least, flag
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.whole_files import Json, write_json, write_text
from research.family.measure import Study, measure_one, race_first_seeds
from research.family.report import convergence, curve, draw, family_table, orders

DRAFTERS = "medusa", "hydra", "hydrapp", "amphista", "amphista_alpha"
# label_weight and teacher_weight of each paper's loss: Medusa equation 1; Hydra 3 and, for Hydra++,
# 6.1; Amphista equations 7 to 9; EAGLE 3.2 (its regression and noise are in its configuration); EAGLE-3 3.2.
LOSSES = {"medusa": (1.0, 0.0), "hydra": (1.0, 0.0), "hydrapp": (0.0, 1.0),
          "amphista": (0.1, 1.0), "amphista_alpha": (0.1, 1.0),
          "eagle": (0.0, 0.1), "eagle3": (0.0, 1.0)}  # fmt: skip
CURVE_POINTS = 8
# Fields that may differ between a finished training and the requested one: logging, directories and
# chunking.
NO_MATTER = ("log_every", "eval_every", "save_every", "keep_checkpoints",
             "features_path", "loss_chunk", "remat")  # fmt: skip
EXAMPLES = """examples (from the project's root, after `python -m research demo_build`):
  medusa distill --model medusa_jax/demo/backbone --temperature 0 \\
      --prompts work/demo/calibration.jsonl --out work/demo/answers_apart   (held-out answers)
  python -m research family --model medusa_jax/demo/backbone \\
      --data work/demo/answers --eval_data work/demo/answers_apart \\
      --calibration work/demo/calibration.jsonl --steps 600 --out work/family
  python -m research family ... --config.optim.lr=1e-3    (for every training)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(Study):
    """Train and measure drafters under identical conditions on one backbone."""

    data: str = flag("training text (data.source)")
    eval_data: str = flag("held-out text for the curves", "")
    drafters: tuple[str, ...] = flag("eagle as well with --lm_head shared", DRAFTERS)
    recipe: str = flag("configs/{recipe}_{drafter}.py are used", "demo")
    only: list[str] = flag(  # noqa: RUF009
        "a field for one drafter, such as medusa:heads.n_layers=2",
        [],
        metavar="DRAFTER:FIELD=VALUE",
    )
    seeds: int = flag("trainings of each drafter", 3, type=at_least(1))
    steps: int = flag("of a training", 2000)
    n_heads: int = flag("of every drafter", 4)
    lm_head: str = flag("own, shared or low_rank, for all", "low_rank")
    rank: int = flag("of low_rank", 64)
    out: str = flag("directory for everything", "work/family")
    # Of every training, as they are typed.
    fields: tuple[str, ...] = ()


def train_one(flags: Flags, name: str, seed: int) -> Path:
    """Train a drafter unless its result exists; returns the directory of the run.

    Raises:
      UserError: the training ended without a result, or the existing one was trained differently.
    """
    run = Path(flags.out) / f"{name}-s{seed}"
    export = run / "export" / "heads.safetensors"
    weights = zip(("label_weight", "teacher_weight"), LOSSES.get(name, ()))
    arguments = [
        f"--config=configs/{flags.recipe}_{name}.py", f"--workdir={run}",
        f"--config.model.path={flags.model}", f"--config.data.source={flags.data}",
        f"--config.data.eval_source={flags.eval_data}", f"--config.data.seed={seed}",
        f"--config.train.seed={seed}", f"--config.train.steps={flags.steps}",
        f"--config.heads.n_heads={flags.n_heads}", f"--config.heads.lm_head={flags.lm_head}",
        f"--config.heads.rank={flags.rank}",
        *(f"--config.train.{field}={weight}" for field, weight in weights),
        # All drafters share one cache of hidden states.
        "--config.data.cache_features=float32",
        f"--config.data.features_path={flags.out}/features",
        f"--config.train.eval_every={max(flags.steps // CURVE_POINTS, 1)}",
        f"--config.train.save_every={max(flags.steps // 2, 1)}", *flags.fields,
        *(f"--config.{f}" for drafter, _, f in (x.partition(":") for x in flags.only) if drafter == name)
    ]  # fmt: skip
    if export.exists():
        refuse_other(run, dataclasses.asdict(train.parse(arguments)))
        inform(f"{name}, seed {seed}: {export} exists, not trained again")
        return run
    inform(f"{name}, seed {seed}: train.py {' '.join(arguments)}")
    train.run(train.main.parse(arguments))
    if not export.exists():
        raise UserError(f"training {name} with seed {seed} failed; its command is above")
    return run


def refuse_other(run: Path, config: Json) -> None:
    """Refuse a finished training whose heads, data, optimizer or losses differ from the requested ones.

    Raises:
      UserError: names the fields.
    """
    try:
        saved = json.loads((run / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run} holds heads, but no readable config.json: {error}"
        ) from error
    differences = []
    for group in ("heads", "data", "optim", "lora", "train"):
        for name, value in config[group].items():
            saved_value = saved.get(group, {}).get(name, value)
            if name not in NO_MATTER and saved_value != value:
                differences.append(f"{group}.{name} {saved_value} (asked: {value})")
    if differences:
        raise UserError(
            f"{run} was trained with {', '.join(differences)}; remove it or use another --out"
        )


def run(flags: Flags) -> int:
    """Train, measure, write."""
    wrong = [word for word in flags.fields if not word.startswith("--config.")]
    if wrong:
        raise UserError(f"unknown flag {wrong[0]} (see --help)")
    if not os.path.exists("train.py"):
        raise UserError("run this from the project's root, where train.py is")
    use_compilation_cache()
    names = flags.drafters
    if "eagle" in names and flags.lm_head != "shared":
        raise UserError(
            f"eagle predicts hidden states for the model's LM head, so it needs --lm_head shared, "
            f"not {flags.lm_head}"
        )
    for override in flags.only:
        if override.partition(":")[0] not in names:
            raise UserError(f"--only {override}: the drafters are {', '.join(names)}")
    for name in names:
        if not os.path.exists(f"configs/{flags.recipe}_{name}.py"):
            raise UserError(
                f"there is no configs/{flags.recipe}_{name}.py for --drafters {name}"
            )
    # Train everything first, so that all measurements are taken together.
    dirs = {n: [train_one(flags, n, s) for s in range(flags.seeds)] for n in names}
    runs = {name: [measure_one(flags, path) for path in dirs[name]] for name in names}
    curves = {name: [curve(path) for path in dirs[name]] for name in names}
    speeds = race_first_seeds(flags, dirs, runs)
    text = "\n\n".join(
        (family_table(runs, speeds), convergence(curves), orders(runs) + "\n")
    )
    out = Path(flags.out)
    facts = {"runs": runs, "speeds": speeds, "curves": curves}
    write_json(out / "family.json", facts | {"flags": dataclasses.asdict(flags)})
    write_text(out / "family.md", text)
    print(text)
    draw(runs, speeds, curves, out / "family.png")
    inform(f"wrote {out}/family.md, family.json and family.png")
    return 0


main = train.FieldsLine("python -m research family", Flags, run, EXAMPLES, resumes=True)
