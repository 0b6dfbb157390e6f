"""`python -m research demo_build`: rebuild the bundled demo from scratch with one command.

Eight stages, each a separate documented command, each skipped if its result exists:

    corpus      the standard library as text, a tokenizer, prompts      demo_corpus
    backbone    a small Llama trained from scratch                      train.py demo_backbone
    native      three more layers, trained together with heads          train.py demo_native
    answers     its continuations of training prompts                   distill
    heads       draft heads trained on those                            train.py demo_{drafter}
    tree        the draft tree fitted to heads and device               calibrate
    draft model a model of one layer, if --drafters names it            train.py demo_draft_model
    install     weights, tokenizer, heads, tree, prompts into --install

Training resumes automatically, so a stopped build continues where it was. The budgets are for two CPU
cores and an hour or two; on an accelerator use `--steps_factor 20`.

The greedy text of a small model loops, so its generation_config.json bars repeated 5-grams, as a
published model's may: the answers for training heads, the fitted trees and all measurements are of text
without loops.
"""

import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_jax.commands.flags import CommandLine, flag
from medusa_jax.config import LlamaConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files import hf
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.layouts import heads_io, native_heads
from medusa_jax.sharding import make_mesh
from medusa_jax.training.run_log import read_log
from medusa_jax.whole_files import Json, write_json, write_text

DRAFT_MODEL = "draft_model"
# Number of seed prompts reserved for calibration.
CALIBRATION_SEEDS = 128
DEMO_PROMPTS = 64
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
GENERATION_FILE, RECIPE_FILE = "generation_config.json", "recipe.json"
GENERATION = {"no_repeat_ngram_size": 5}


def fields(text: str) -> list[str]:
    """Flags that set fields of a training: "train.steps=4" -> ["--config.train.steps=4"]."""
    return [f"--config.{field}" for field in text.split()]


# Flags of --tiny: seconds instead of minutes, for a model that learns almost nothing.
_SHORT = fields(
    "data.seq_len=64 data.eval_samples=4 train.loss_chunk=64 optim.warmup_steps=1"
)
TINY = {
    "corpus": ["--limit_mb=0.5", "--heldout=0.2", "--vocab=512"],
    "backbone": [
        *_SHORT,
        *fields("model.arch.vocab_size=512 model.arch.d_model=32 model.arch.n_layers=2"),
        *fields("model.arch.n_heads=2 model.arch.n_kv_heads=1 model.arch.head_dim=16"),
        *fields("model.arch.d_ff=48 train.batch_size=4 train.steps=6 optim.warmup_steps=2"),
    ],
    "native": [*_SHORT, *fields("heads.rank=8 train.batch_size=2 train.steps=3")],
    "answers": ["--limit=8", "--batch_size=4", "--max_new_tokens=24"],
    "heads": [
        *_SHORT,
        *fields("heads.rank=8 data.seq_len=128 train.batch_size=2 train.steps=4"),
    ],
    "tree": [
        "--limit=2", "--max_new_tokens=16", "--sizes=1,2,4", "--rounds=1", "--batches=1",
    ],
    "draft_model": [
        *_SHORT,
        *fields("model.arch.vocab_size=512 model.arch.d_model=16 model.arch.n_heads=2"),
        *fields("model.arch.n_kv_heads=1 model.arch.head_dim=8 model.arch.d_ff=24"),
        *fields("train.steps=4"),
    ],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Rebuild the bundled demo model and heads (run from the project's root)."""

    work: str = flag("directory for everything on the way", "work/demo")
    install: str = flag(
        "where the result goes; medusa_jax/demo replaces the bundled one",
        "work/demo/install",
    )
    drafters: tuple[str, ...] = flag(
        "comma-separated; each has a configs/demo_{drafter}.py", ("hydra",)
    )
    answers: int = flag("prompts to continue", 4096)
    steps_factor: float = flag(
        "train the backbone and native stages this many times as long", 1.0
    )
    tiny: bool = flag("a tiny budget, to check that everything runs", False)


def stage(name: str, output: Path, command: Sequence[str]) -> None:
    """Run one command unless its result exists.

    Raises:
      UserError: the command failed.
    """
    if output.exists():
        inform(f"{name}: {output} exists, skipped")
        return
    inform(f"{name}: {' '.join(command)}")
    code = subprocess.run([sys.executable, *command]).returncode
    if code or not output.exists():
        raise UserError(f"stage '{name}' failed (exit status {code}); its command is above")


def run(flags: Flags) -> int:
    if not os.path.exists("train.py"):
        raise UserError("run this from the project's root, where train.py is")
    work = Path(flags.work)
    extra: dict[str, list[str]] = TINY if flags.tiny else scaled(flags.steps_factor)
    stage(
        "corpus",
        work / "corpus.json",
        ["-m", "research", "demo_corpus", f"--out={work}", *extra["corpus"]],
    )
    backbone, answers = work / "backbone", work / "answers"
    stage(
        "backbone",
        backbone / "export" / "model.safetensors",
        [
            "train.py", "--config=configs/demo_backbone.py", f"--workdir={backbone}",
            f"--config.data.source={work}/train", f"--config.data.eval_source={work}/heldout",
            f"--config.model.tokenizer={work}/tokenizer", *extra["backbone"],
        ],
    )  # fmt: skip
    calibration = split_seeds(work)
    native = work / "native"
    stage(
        "native",
        native / "export" / "model.safetensors",
        [
            "train.py", "--config=configs/demo_native.py", f"--workdir={native}",
            f"--config.model.path={backbone}/export", f"--config.data.source={work}/train",
            f"--config.data.eval_source={work}/heldout", *extra["native"],
        ],
    )  # fmt: skip
    source = native / "export"
    write_json(source / GENERATION_FILE, GENERATION, indent=None)
    stage(
        "answers",
        answers / "provenance.json",
        [
            "-m", "medusa_jax", "distill", f"--model={source}",
            f"--prompts={work}/answer_seeds.jsonl", f"--out={answers}",
            f"--limit={flags.answers}", "--batch_size=64", "--max_new_tokens=200", "--temperature=0",
            *extra["answers"],
        ],
    )  # fmt: skip
    drafters = list(flags.drafters)
    if DRAFT_MODEL in drafters:
        drafters.remove(DRAFT_MODEL)
        draft_model = work / DRAFT_MODEL
        stage(
            "draft model",
            draft_model / "export" / "model.safetensors",
            [
                "train.py", "--config=configs/demo_draft_model.py", f"--workdir={draft_model}",
                f"--config.data.source={work}/train", f"--config.data.eval_source={work}/heldout",
                f"--config.model.tokenizer={work}/tokenizer", *extra[DRAFT_MODEL],
            ],
        )  # fmt: skip
    for drafter in drafters:
        heads = work / drafter
        stage(
            "heads",
            heads / "export" / "heads.safetensors",
            [
                "train.py", f"--config=configs/demo_{drafter}.py", f"--workdir={heads}",
                f"--config.model.path={source}", f"--config.data.source={answers}",
                f"--config.data.eval_source={work}/heldout",
                f"--config.data.features_path={work}/features",
                *(["--config.train.steps=1200"] if drafter == "medusa" else []),
                *extra["heads"],
            ],
        )  # fmt: skip
        stage(
            "tree",
            heads / "export" / "tree.json",
            [
                "-m", "medusa_jax", "calibrate", f"--model={source}",
                f"--drafter={heads}/export", f"--prompts={calibration}",
                f"--out={heads}/export/tree.json", *extra["tree"],
            ],
        )  # fmt: skip
    install(work, source, Path(flags.install), drafters)
    return 0


def scaled(factor: float) -> dict[str, list[str]]:
    """Flags that make trainings `factor` times as long as in their configurations.

    Raises:
      UserError: the factor is not positive.
    """
    if factor <= 0:
        raise UserError(f"--steps_factor must be positive, not {factor}")
    flags: dict[str, list[str]] = {name: [] for name in TINY}
    if factor != 1:
        for name in ("backbone", "native"):
            steps = runpy.run_path(f"configs/demo_{name}.py")["get_config"]().train.steps
            flags[name].append(f"--config.train.steps={max(round(steps * factor), 1)}")
    return flags


def split_seeds(work: Path) -> Path:
    """Separate calibration prompts from those for training heads.

    They are shuffled: seeds are sorted by file, so a prefix would cover only the first files.
    """
    lines = (work / "seeds.jsonl").read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    n_held_out = min(CALIBRATION_SEEDS, len(lines) // 4)
    write_text(work / "answer_seeds.jsonl", "".join(lines[:-n_held_out]))
    path = work / "calibration.jsonl"
    write_text(path, "".join(lines[-n_held_out:]))
    return path


def spread(records: list[Json], n: int) -> list[Json]:
    """Select n records round-robin over `file`, so that no long file dominates."""
    by_file: dict[str, list[Json]] = {}
    for record in records:
        by_file.setdefault(record["file"], []).append(record)
    picks: list[Json] = []
    turn = 0
    while len(picks) < n and any(len(group) > turn for group in by_file.values()):
        picks += [group[turn] for group in by_file.values() if len(group) > turn]
        turn += 1
    return picks[:n]


def install(work: Path, source: Path, target: Path, drafters: Sequence[str]) -> None:
    """Install what the package ships: backbone and heads in bfloat16, their trees, prompts."""
    mesh = make_mesh()
    config, params = hf.load_backbone(str(source), mesh)
    fields = json.loads((source / "config.json").read_text())
    ends = {key: fields[key] for key in ("bos_token_id", "eos_token_id") if key in fields}
    save_backbone(str(target / "backbone"), config, params, "bfloat16", ends)
    for file in TOKENIZER_FILES:
        write_text(target / "backbone" / file, compact((source / file).read_text()))
    shutil.copyfile(source / GENERATION_FILE, target / "backbone" / GENERATION_FILE)
    for drafter in drafters:
        install_heads(work / drafter / "export", target / drafter, config)
    draft_model = work / DRAFT_MODEL
    if draft_model.exists():
        install_draft_model(draft_model / "export", target / DRAFT_MODEL)
    lines = (work / "heldout" / "prompts.jsonl").read_text().splitlines()
    prompts = spread([json.loads(line) for line in lines], DEMO_PROMPTS)
    keys = ("file", "prompt", "prompt_ids", "continuation_ids")
    rows = [json.dumps({key: record[key] for key in keys}) + "\n" for record in prompts]
    write_text(target / "prompts.jsonl", "".join(rows))
    summary = {
        "corpus": json.loads((work / "corpus.json").read_text()),
        "backbone": last_record(work / "backbone"),
        "native": last_record(work / "native"),
        "answers": json.loads((work / "answers" / "provenance.json").read_text()),
        "heads": {drafter: last_record(work / drafter) for drafter in drafters},
    }
    if draft_model.exists():
        summary[DRAFT_MODEL] = last_record(draft_model)
    write_json(target / "provenance.json", summary)
    size = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    inform(f"installed in {target}: {size / 1e6:.1f} MB")


def install_heads(trained: Path, out: Path, config: LlamaConfig) -> None:
    """Install heads in bfloat16 and their tree."""
    heads, params, described = heads_io.load_heads(str(trained), config, make_mesh())
    native_heads.save_heads(
        str(out), heads, params, base=described["base"],
        recipe=relative(described["recipe"]), dtype="bfloat16",
    )  # fmt: skip
    shutil.copyfile(trained / "tree.json", out / "tree.json")


def install_draft_model(trained: Path, out: Path) -> None:
    """Install the draft model in bfloat16 and its training record; its tokenizer is the backbone's."""
    config, params = hf.load_backbone(str(trained), make_mesh())
    save_backbone(str(out), config, params, "bfloat16")
    recipe = json.loads((trained / RECIPE_FILE).read_text())
    write_json(out / RECIPE_FILE, relative(recipe))


def compact(text: str) -> str:
    """A tokenizer's JSON without blanks, merges as "a b" (byte-level tokens contain no blanks)."""
    content = json.loads(text)
    model = content.get("model", {})
    if model.get("merges") and isinstance(model["merges"][0], list):
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def last_record(workdir: Path) -> Json:
    """The configuration of a training run and the last lines of its log."""
    last = {record["kind"]: record for record in read_log(workdir / "log.jsonl")}
    config = json.loads((workdir / "config.json").read_text())
    return relative({"config": config, "last": last})


def relative(record: Json) -> Json:
    """The record with paths relative to the project's root."""
    root = json.dumps(f"{os.getcwd()}/")[1:-1]
    copy: Json = json.loads(json.dumps(record).replace(root, ""))
    return copy


main = CommandLine("python -m research demo_build", Flags, run)
