"""`medusa own MODEL QUESTIONS --out DIR`: distill, train, calibrate and compare, with an estimate of the time.

DIR gets text/ (distill), run/ (train; run/export/ has the heads, their tree and their certificate), compare/ (bench), a
directory for each engine of --to, and own.json, the plan with the seconds of each part. Every part resumes, so the same
command goes on after a stop.

After a fine-tuning, --start HEADS goes on from the heads of the model before it. They are copied to start/ as heads of
the new model. `sft_draft` is the same as a function.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_jax.commands import bench, calibrate, convert, distill, next_command, train
from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.commands.verify import certify
from medusa_jax.config import Config, HeadsConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.json_files import read_json
from medusa_jax.files.not_replaced import refuse_model
from medusa_jax.heads.names import drafter_at
from medusa_jax.progress import duration
from medusa_jax.whole_files import Json, read_text, write_json, write_text

if TYPE_CHECKING:
    from medusa_jax.distill.seeds import Seed
    from medusa_jax.evaluate.own_costs import Costs, Workload
    from medusa_jax.files.hf import BaseFiles
    from medusa_jax.files.layouts.stored_heads import StoredHeads

EXAMPLES = """examples:
  medusa own smollm2 questions.jsonl --out work/own
  medusa own my_model.gguf questions.jsonl --out work/own --minutes 20 --drafter eagle3
  medusa own tuned_model questions.jsonl --out work/own --start heads_of_the_model --to vllm
"""
# BATCH questions are answered at a time. Heads do not learn from the last HELD_OUT; COMPARED of these are raced at the end.
BATCH, HELD_OUT, COMPARED = 16, 16, 4
# HEADS: where DIR has the trained heads. RESTARTED: the learning rate with --start.
HEADS = "run/export"
RESTARTED = 1e-3
# Tokens that a chat template adds, roughly.
TEMPLATE = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Train draft heads for a model of yours, from questions like those it will be asked."""

    model: str = flag("directory, .gguf file, hub id or name", name="model")
    questions: str = flag("JSONL with messages, turns or prompt", name="questions")
    out: str = flag("directory for everything; the same command goes on in it")
    minutes: float | None = flag("fit the work to this time", None, type=at_least(1, float))
    drafter: str | None = flag(
        "family of heads to train (default: the family of --start, or medusa)", None
    )
    start: str | None = flag(
        "train these heads further, such as the heads of the model before its fine-tuning",
        None,
    )
    to: tuple[str, ...] = flag(
        "comma-separated engines to convert the heads for, as convert --to", ()
    )
    chat_template: str | None = flag("a shipped one (default: the tokenizer's own)", None)
    limit: int = flag("most questions; 0 is all", 200, type=at_least(0))
    max_new_tokens: int = flag("per answer", 200, type=at_least(1))
    server: str | None = flag("as for distill", None, metavar="URL")


def sft_draft(
    model: str | PathLike[str], data: str | PathLike[str], *, out: str | PathLike[str],
    start: str | PathLike[str] | None = None, to: Sequence[str] = (), **more: Any,
) -> str:  # fmt: skip
    """Rebuild draft heads after a model was fine-tuned; a second call goes on after a stop. `medusa own` is the same.

    Args:
      model: the tuned model: a directory, a .gguf file, a hub id or a name.
      data: JSONL with questions like those that it will be asked; it answers them itself.
      out: directory for everything.
      start: the heads of the model before; None trains new ones.
      to: engines to convert the heads for.
      more: other flags of `medusa own`, such as `minutes=10`.

    Returns: the directory of the heads, with tree and certificate.
    """
    given: Json = {"model": fspath(model), "questions": fspath(data), "out": fspath(out)}
    given |= {"start": fspath(start) if start else None, "to": tuple(to)}
    run(Flags(**given, **more))
    return str(Path(out, HEADS))


def run(flags: Flags) -> int:
    """Plan, then do the parts that are not done yet."""
    from medusa_jax import hosts
    from medusa_jax.api import find_model
    from medusa_jax.files.hf import BaseFiles

    refuse_model(flags.out, "--out")
    out = Path(flags.out)
    with hosts.locked(out), next_command.silent():
        base = BaseFiles.open(find_model(flags.model))
        start = first_heads(flags, base)
        plan = plan_of(flags, out, base, start)
        bind_start(flags, out, base, start)
        heads = do_parts(flags, out, plan, start)
    spent, planned = (duration(sum(plan[name].values())) for name in ("spent", "seconds"))
    inform(f"done in {spent}, {planned} were estimated; the heads are in {heads}")
    kind = start.heads.drafter if start else flags.drafter or ""
    drafter, chat = drafter_at(kind, str(heads)), flags.chat_template
    next_command.print_next("serve", model=flags.model, drafter=drafter, chat=chat)
    return 0


def first_heads(flags: Flags, base: "BaseFiles") -> "StoredHeads | None":
    """The heads of --start, if any.

    Raises:
      UserError: it names none, or heads for a model of other sizes.
    """
    from medusa_jax.api import find_heads
    from medusa_jax.files.layouts.heads_io import check_base

    if not flags.start:
        return None
    if not (stored := find_heads(flags.model, flags.start)):
        raise UserError(
            f"--start {flags.start} has no heads: leave it out to train new ones"
        )
    check_base(stored, base.config, None)
    return stored.fitted(base)


def plan_of(
    flags: Flags, out: Path, base: "BaseFiles", start: "StoredHeads | None"
) -> Json:
    """The plan in own.json, made at the first start.

    Raises:
      UserError: it was made for other flags or content, or engines of --to cannot load such heads.
    """
    from medusa_jax.distill.seeds import digest_of, read_seeds
    from medusa_jax.mapped import sha256_of

    seeds = read_seeds(flags.questions, "train", flags.limit)
    file, given = out / "own.json", dataclasses.asdict(flags)
    del given["out"], given["to"]  # engines may change: their part is the last
    # Files are compared by content, so that they may move.
    given |= {"model": base.fingerprint(), "questions": digest_of(seeds)}
    given["start"] = start and "".join(sha256_of(x)[:16] for x in sorted(start.files))
    plan: Json = {}
    if file.exists():
        plan = read_json(str(file))
        missing = {"flags", "job", "seconds", "spent"} - plan.keys()
        missing = missing or given.keys() - plan["flags"].keys()
        missing = missing or {"batch", "questions", "steps"} - plan["job"].keys()
        if missing:
            raise UserError(f"{file} does not say {', '.join(sorted(missing))}")
        old = plan["flags"]
        changed = [
            f"{x} {old[x]!r}, now it is {given[x]!r}" for x in given if old[x] != given[x]
        ]
        if changed:
            raise UserError(
                f"{out} was started with {'; '.join(changed)}: use another --out"
            )
    cfg = recipe(flags, out, start)
    check_engines(flags, cfg.heads, base)
    if plan:
        return plan
    job, costs = fitted(flags, seeds, cfg)
    seconds = job.seconds(costs)
    plan = {"flags": given, "job": job._asdict(), "costs": costs._asdict()}
    write_json(file, plan | {"seconds": seconds, "spent": {}})
    parts = ", ".join(f"{part} {duration(s)}" for part, s in seconds.items())
    inform(
        f"about {duration(sum(seconds.values()))}: {job.questions} questions, {job.steps} steps of training "
        f"({parts}); stop it at any time, the same command goes on"
    )
    return plan | {"seconds": seconds, "spent": {}}


def check_engines(flags: Flags, heads: HeadsConfig, base: "BaseFiles") -> None:
    """Before any work, refuse engines of --to that cannot load the heads, and a --drafter that differs from --start."""
    from medusa_jax.files.layouts.engines import why_not

    if flags.drafter not in (None, heads.drafter):
        raise UserError(f"--start has {heads.drafter} heads: leave out --drafter")
    for engine in flags.to:
        if reason := why_not(heads, engine, base.config):
            raise UserError(reason)


def bind_start(
    flags: Flags, out: Path, base: "BaseFiles", start: "StoredHeads | None"
) -> None:
    """Write the heads of --start to out/start, bound to the model."""
    from medusa_jax.files.layouts.convert import convert
    from medusa_jax.files.layouts.layout import Export

    if start and not (bound := out / "start").exists():
        export = Export(start, base, flags.model)
        convert(export, "native", str(bound), allow_other_base=True)


def recipe(
    flags: Flags, out: Path, start: "StoredHeads | None" = None, **fields: object
) -> Config:
    """The configuration of the training, which goes on from the heads of --start in out/start."""
    from medusa_jax.training.own_recipe import recipe_with

    # Before distill has written the text, its size is unknown, so the recipe keeps its largest batch.
    given: Json = {"model.path": flags.model, "data.source": str(out / "text.jsonl")}
    given |= {"heads.drafter": flags.drafter or "medusa"}
    given |= {"data.chat_template": flags.chat_template or ""}
    if start:
        given |= {f"heads.{name}": value for name, value in vars(start.heads).items()}
        given |= {"train.heads_path": str(out / "start"), "optim.lr": RESTARTED}
    return recipe_with(given | fields, str(out / "run"))


def fitted(flags: Flags, seeds: "list[Seed]", cfg: Config) -> "tuple[Workload, Costs]":
    """Measure this machine, and fit the work to --minutes.

    Raises:
      UserError: too few questions, or minutes; no chat template for them.
    """
    from medusa_jax.api import load
    from medusa_jax.distill.seeds import mode_for
    from medusa_jax.evaluate.own_costs import Workload, measure
    from medusa_jax.kept_programs import use_compilation_cache
    from medusa_jax.text.chat import is_chat_model, template_source
    from medusa_jax.training.own_recipe import PASSES, UPDATES, batch_for

    began = time.perf_counter()
    use_compilation_cache()
    texts = [s.prompt or s.turns[0] for s in seeds if s.turns or s.prompt]
    if len(texts) < 2 * HELD_OUT:
        within = f" within --limit {flags.limit}" if len(texts) == flags.limit else ""
        raise UserError(
            f"{flags.questions} has {len(texts)} questions{within}, {2 * HELD_OUT} are needed"
        )
    inform("measuring this machine ...")
    model = load(flags.model, "none")
    is_chat = is_chat_model(model.tokenizer, flags.model)
    if mode_for(seeds, "auto", is_chat) != "continue":
        template_source(model.tokenizer, flags.chat_template or "")
    costs = measure(model, BATCH, cfg.heads.n_heads, cfg.heads.draft_vocab)
    lengths = [len(model.encode(text)) + TEMPLATE for text in texts]
    answer = flags.max_new_tokens

    def job(n: int, share: float) -> "Workload":
        longest = sorted(lengths[:n], reverse=True)[::BATCH]
        padded = [1 << k.bit_length() for k in longest]
        read = BATCH * (sum(padded) + sum(set(padded)))  # once more to compile
        tokens = sum(lengths[:n]) + n * answer
        batch = batch_for(cfg, tokens)
        positions = batch * cfg.data.seq_len
        steps = max(1, int(share * min(UPDATES, PASSES * tokens // positions)))
        learned = steps * positions * n * answer // tokens
        decoded, compared = len(longest) * answer, COMPARED * answer
        return Workload(
            n, len(set(padded)), batch, steps, decoded, read, tokens, learned, compared
        )

    left = 60 * flags.minutes - (time.perf_counter() - began) if flags.minutes else math.inf
    for n in (*range(len(texts), 2 * HELD_OUT, -BATCH), 2 * HELD_OUT):
        for share in (1.0, 0.75, 0.5):
            one = job(n, share)
            seconds = sum(one.seconds(costs).values())
            if seconds <= left:
                return one, costs
    least = math.ceil((seconds + time.perf_counter() - began) / 60)
    raise UserError(
        f"--minutes {flags.minutes:g} is too short on this machine: at least {least}"
    )


def do_parts(flags: Flags, out: Path, plan: Json, start: "StoredHeads | None") -> Path:
    """Do what has no result yet; returns the directory of the heads."""
    from medusa_jax.files.layouts.native_heads import CERTIFICATE

    text, heads = out / "text", out / HEADS
    steps, batch = plan["job"]["steps"], plan["job"]["batch"]
    shared: Json = {"model": flags.model, "max_new_tokens": flags.max_new_tokens}
    template = flags.chat_template or ""

    def part(name: str, result: Path, do: Callable[[], int]) -> None:
        if result.exists():
            return inform(f"{name}: done before, {result}")
        inform(f"{name}: about {duration(plan['seconds'][name])}")
        began, spent = time.perf_counter(), plan["spent"]
        try:
            do()
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
            write_json(out / "own.json", plan)

    part("answers", text / "provenance.json", lambda: distill.run(distill.Flags(
        prompts=flags.questions, out=str(text), limit=plan["job"]["questions"], max_turns=1,
        batch_size=BATCH, server=flags.server, chat_template=template, **shared,
    )))  # fmt: skip
    source, kept, evaluated = split(text)
    part("training", heads / "heads.json", lambda: train.train(recipe(flags, out, start, **{
        "data.source": str(source), "data.eval_source": str(evaluated), "data.held_out": 0, "train.steps": steps,
        "train.batch_size": batch, "train.eval_every": max(1, steps // 4),
    })))  # fmt: skip
    part("tree", heads / "tree.json", lambda: calibrate.run(calibrate.Flags(
        drafter=str(heads), prompts=str(kept), out=str(heads / "tree.json"), batches=(1,),
        chat_template=template, **shared,
    )))  # fmt: skip
    compared = [out / "start", heads] if start else [heads]
    part("comparison", out / "compare" / "race.json", lambda: bench.run(bench.Flags(
        drafters=tuple(map(str, compared)), prompts=str(kept), limit=COMPARED, repeats=1,
        out=str(out / "compare"), chat_template=template, **shared,
    )))  # fmt: skip
    for place in (heads, *(out / engine for engine in flags.to)):
        if not place.exists():
            convert.run(convert.Flags(
                model=flags.model, drafter=str(heads), to=place.name, out=str(place),
            ))  # fmt: skip
        elif not (place / CERTIFICATE).exists():
            certify(flags.model, str(place), str(place))
    return heads


def split(text: Path) -> tuple[Path, Path, Path]:
    """Text to learn from; the last answers as lines, and as data to evaluate on."""
    from medusa_jax.distill.files import write_token_directory

    continued = (text / "samples.jsonl").exists()
    lines = read_text(
        text / ("samples.jsonl" if continued else "messages.jsonl")
    ).splitlines()
    lines = [line for line in lines if continued or json.loads(line)["answers"]]
    files = [text / "learned.jsonl", text / "held_out.jsonl"]
    for file, part in zip(files, (lines[:-HELD_OUT], lines[-HELD_OUT:])):
        content = "".join(f"{line}\n" for line in part)
        if file.exists() and read_text(file) == content:
            continue  # training finds its tokens by the files' times
        if continued:
            write_token_directory(file.with_suffix(""), [json.loads(line) for line in part])
        write_text(file, content)
    source, evaluated = [file.with_suffix("") for file in files] if continued else files
    return source, files[1], evaluated


main = CommandLine("medusa own", Flags, run, EXAMPLES, resumes=True)
