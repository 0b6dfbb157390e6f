"""`python -m medusa_jax.distill`: the model answers seed prompts, heads learn from the answers.

Heads are trained on what they will have to guess: the model's own output (Medusa 2.3.2). Seeds
are prompts to go on with, or conversations whose user turns are asked again (see
`conversation.py` for the three modes). The output directory holds

    messages.jsonl    chat modes, one conversation a line, in the order of the seeds:
                      {"seed": 7, "messages": [...], "answers": [{"tokens", "steps", "finish"}],
                      "cut": true (the last answer was broken off), "problem": why it ended early}
    samples.jsonl     mode continue: {"prompt_ids": [...], "token_ids": [...]}
    tokens.npy, doc_starts.npy, counted.npy
                      mode continue: the same as a token directory; prompts are not counted
    settings.json     everything that decides the text
    provenance.json   settings, sizes and speed, written when all is done

A run that was stopped, even killed, goes on behind its last whole batch and ends with the same
files, byte for byte.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.cli.flags import (
    add_model,
    add_no_repeat,
    add_prompts,
    command,
    load_model,
    parse_mesh,
    run_command,
)
from medusa_jax.console import announced, say
from medusa_jax.errors import UserError

EXAMPLES = """examples:
  python -m medusa_jax.distill --prompts seeds.jsonl --out work/answers
  python -m medusa_jax.distill --model lmsys/vicuna-33b-v1.3 --chat_template vicuna \\
      --prompts Aeala/ShareGPT_Vicuna_unfiltered --out work/vicuna33b --temperature 0.3 \\
      --max_new_tokens 1024 --batch_size 16 --drafter path/to/first/heads
  python -m medusa_jax.distill --model HuggingFaceH4/zephyr-7b-beta --mode self_talk \\
      --prompts HuggingFaceH4/ultrachat_200k --split train_sft --out work/zephyr7b
"""
# Two lines about progress are at least so many seconds apart where there is no terminal.
NEWS_SECONDS = 30.0


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax.distill",
        "Let a model answer seed prompts and write a training set of its own text.",
        EXAMPLES,
    )
    add = p.add_argument
    add_prompts(
        p,
        limit=0,
        what="seeds: .jsonl, .json or a hub dataset, with prompt, prompt_ids, turns, messages "
        "or conversations",
    )
    add("--out", required=True, help="directory to write")
    add("--mode", default="auto",
        help="continue, multi_turn or self_talk; auto: continue for prompts, else multi_turn")  # fmt: skip
    add_model(p, drafter="none")
    add("--tree", default="auto", help="as for decode.py")
    add("--chat_template", default="", help="a shipped one; default: the tokenizer's own")
    add("--mesh", default="1,1,1", help="devices along data, fsdp, tensor")
    add("--temperature", type=float,
        help="default: 0.3 in the chat modes (the paper's), 0 in mode continue")  # fmt: skip
    add("--top_p", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add_no_repeat(p)
    add("--max_new_tokens", type=int, default=200, help="per answer")
    add("--max_turns", type=int, default=4, help="most answers in a conversation")
    add("--batch_size", type=int, default=32)
    add("--split", default="train", help="of a hub dataset")
    return p


def read_prompts(path: str, limit: int = 0) -> list[dict[str, Any]]:
    """Records of a JSONL file, each with `prompt` or `prompt_ids`."""
    try:
        with open(path) as file:
            lines = [line for line in file if line.strip()]
        records = [json.loads(line) for line in lines[: limit or None]]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts in {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSONL: {error}") from error
    if not all(
        isinstance(r, dict) and ("prompt" in r or "prompt_ids" in r) for r in records
    ):
        raise UserError(f"every line of {path} needs 'prompt' or 'prompt_ids'")
    if not records:
        raise UserError(f"{path} holds no prompts")
    return records


def read_seeds(source: str, split: str, limit: int) -> list[Any]:
    """All seeds of a file or hub dataset.

    Raises:
      UserError: unreadable, or without a single usable seed.
    """
    from medusa_jax.config import DataConfig
    from medusa_jax.conversation import read_seed
    from medusa_jax.training.prepare import read_records

    records = read_records(source, DataConfig(split=split, max_samples=limit))
    seeds = []
    for number, record in enumerate(records):
        if isinstance(record, str):
            try:
                record = json.loads(record)
            except ValueError:
                record = None
        seeds.append(read_seed(number, record))
    if not any(s.turns or s.prompt for s in seeds):
        raise UserError(
            f"{source} has no seeds: records need prompt, prompt_ids, turns, messages or "
            "conversations"
        )
    return seeds


def finished_lines(path: Path, batch_size: int, total: int) -> list[dict[str, Any]]:
    """Samples of an earlier run, whole batches only; the rest of the file is dropped.

    Only whole batches, so that a batch is always decoded with the same neighbours: rounding
    then is the same too, and a resumed file equals an uninterrupted one.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    if len(lines) < total:
        lines = lines[: len(lines) // batch_size * batch_size]
    with open(path, "rb+") as file:
        file.truncate(sum(len(line) + 1 for line in lines))
    return [json.loads(line) for line in lines]


def check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Write what decides the text, or refuse to go on with something else.

    Raises:
      UserError: the directory was begun with other settings; names the first difference.
    """
    path = out / "settings.json"
    if path.exists():
        before = json.loads(path.read_text())
        for name in sorted(settings | before):
            old, new = before.get(name), settings.get(name)
            if old != new:
                raise UserError(
                    f"{out} was begun with {name} {old!r}, now it is {new!r}: go on with the "
                    "old value or use another --out"
                )
        return
    if any((out / name).exists() for name in ("messages.jsonl", "samples.jsonl")):
        raise UserError(f"{out} has samples but no settings.json: use another --out")
    write_text(path, json.dumps(settings, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Complete or not there."""
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text)
    os.replace(new, path)


def warn_if_quantised(model: str | None) -> None:
    """The paper advises against a quantised teacher: its answers are not the model's own."""
    if not model or not os.path.isdir(model):
        return
    found: Any = None
    for name in ("config.json", "recipe.json"):
        try:
            content = json.loads((Path(model) / name).read_text())
        except (OSError, ValueError):
            continue
        if name == "config.json":
            found = found or (content.get("quantization_config") or {}).get("quant_method")
        else:
            trained_as = content.get("config", {}).get("model", {})
            found = found or trained_as.get("quantise")
    if found:
        say(
            f"warning: {model} is quantised ({found}): heads would learn the quantised model's "
            "answers; the paper advises to distil from the unquantised one (2.3.2)"
        )


def write_token_directory(directory: Path, samples: Sequence[dict[str, Any]]) -> int:
    """tokens.npy, doc_starts.npy and counted.npy of the samples; returns the counted tokens."""
    tokens: list[int] = []
    starts: list[int] = []
    counted: list[bool] = []
    for sample in samples:
        starts.append(len(tokens))
        tokens += sample["prompt_ids"] + sample["token_ids"]
        counted += [False] * len(sample["prompt_ids"]) + [True] * len(sample["token_ids"])
    arrays: dict[str, np.ndarray] = {
        "tokens": np.array(tokens, np.int32),
        "doc_starts": np.array(starts, np.int64),
        "counted": np.array(counted, bool),
    }
    for name, array in arrays.items():
        with open(directory / f".{name}.tmp", "wb") as file:
            np.save(file, array)
        os.replace(directory / f".{name}.tmp", directory / f"{name}.npy")
    return int(arrays["counted"].sum())


class News:
    """How far a run is: a bar at a terminal, else a line now and then, also within a batch.

    Args:
      total, done: seeds in all, and those that an earlier run answered.
    """

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self.total, self.before, self.done = total, done, done
        self.bar = tqdm(total=total, initial=done, unit="seed", disable=None)
        self.start = self.told = time.perf_counter()
        # New tokens of the decode calls that are over, and of the one under way.
        self.tokens, self.growing = 0, 0

    def grow(self, n_new_B: np.ndarray) -> None:
        """Tokens of the rows that are being decoded."""
        self.growing = int(n_new_B.sum())
        self._tell()

    def call_done(self) -> None:
        """A decode call is over."""
        self.tokens, self.growing = self.tokens + self.growing, 0

    def batch_done(self, n: int) -> None:
        """The next `n` seeds are answered."""
        self.done += n
        self.bar.update(n)
        self._tell()

    def _tell(self) -> None:
        now = time.perf_counter()
        made = self.tokens + self.growing
        speed = made / (now - self.start)
        if not self.bar.disable:
            self.bar.set_postfix_str(f"{made} tokens, {speed:.0f} tokens/s")
        elif now - self.told > NEWS_SECONDS:
            self.told = now
            line = f"{self.done} of {self.total} seeds, {made} tokens, {speed:.0f} tokens/s"
            if answered := self.done - self.before:
                left = (now - self.start) / answered * (self.total - self.done) / 60
                line += f", {left:.0f} minutes left"
            say(line)


class Writer:
    """Answers batch after batch, with one decode call's shape for all of them."""

    def __init__(
        self, model: Any, flags: argparse.Namespace, mode: str, options: Any, news: News
    ):
        from medusa_jax.conversation import Converse

        self.model, self.mode, self.options, self.news = model, mode, options, news
        self.batch_size = flags.batch_size
        self.converse = Converse(
            model.tokenizer, model.config.max_position, self.decode, flags.chat_template,
            mode == "self_talk", flags.max_turns,
        )  # fmt: skip

    def decode(
        self, prompts: list[list[int]], numbers: list[int], stops: Sequence[str] = ()
    ) -> list[Any]:
        """Continue prompts. Every seed has its own draws; rows are padded to one batch size."""
        rows = [
            dataclasses.replace(
                self.options,
                seed=self.options.seed + number,
                stop=(stops[i],) if stops and stops[i] else (),
            )
            for i, number in enumerate(numbers)
        ]
        extra = self.batch_size - len(prompts)
        padded = prompts + [prompts[-1]] * extra
        rows += [rows[-1]] * extra
        with announced("compiling"):
            self.model.compile(padded, rows)
        results = self.model.generate(
            padded, rows, watch=lambda n_new_B: self.news.grow(n_new_B[: len(prompts)])
        )
        self.news.call_done()
        return results[: len(prompts)]

    def batches(self, seeds: Sequence[Any]) -> Iterator[list[dict[str, Any]]]:
        """Lines of each batch of seeds."""
        for first in range(0, len(seeds), self.batch_size):
            batch = list(seeds[first : first + self.batch_size])
            yield self.go_on(batch) if self.mode == "continue" else self.converse(batch)

    def go_on(self, seeds: list[Any]) -> list[dict[str, Any]]:
        """The continuation of each prompt, which may fill all but one of the context's slots."""
        room = self.model.config.max_position - 1
        prompts = [self.model.encode(seed.prompt)[:room] for seed in seeds]
        results = self.decode(prompts, [seed.number for seed in seeds])
        return [
            {"prompt_ids": ids, "token_ids": result.token_ids}
            for ids, result in zip(prompts, results)
        ]


def sizes(mode: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts for the report."""
    if mode == "continue":
        made = sum(len(line["token_ids"]) for line in lines)
        return {"samples": len(lines), "answer_tokens": made}
    answers = [answer for line in lines for answer in line["answers"]]
    problems: dict[str, int] = {}
    for line in lines:
        if not line["answers"]:
            problems[line["problem"]] = problems.get(line["problem"], 0) + 1
    steps = sum(a["steps"] for a in answers)
    # The first token of an answer is prefill's.
    tokens = sum(a["tokens"] for a in answers)
    return {
        "samples": sum(bool(line["answers"]) for line in lines),
        "unusable_seeds": problems,
        "answers": len(answers),
        "answers_cut": sum(a["finish"] != "stop" for a in answers),
        "answer_tokens": tokens,
        "mean_accepted_length": round((tokens - len(answers)) / steps, 3)
        if steps
        else None,
    }


def run(flags: argparse.Namespace) -> int:
    """Answer all seeds that are not answered yet."""
    from medusa_jax.api import Options
    from medusa_jax.console import use_compilation_cache
    from medusa_jax.conversation import mode_for
    from medusa_jax.interop.chat import stop_ids, template_source

    if flags.batch_size < 1 or flags.max_turns < 1:
        raise UserError("--batch_size and --max_turns must be at least 1")
    use_compilation_cache()
    seeds = read_seeds(flags.prompts, flags.split, flags.limit)
    mode = mode_for(seeds, flags.mode)
    if mode == "continue":
        seeds = [s for s in seeds if s.prompt]
    if flags.temperature is None:
        flags.temperature = 0.0 if mode == "continue" else 0.3
    options = Options(
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        seed=flags.seed,
    )
    warn_if_quantised(flags.model)
    tree = "none" if flags.drafter == "none" else flags.tree
    model = load_model(flags, tree=tree, mesh=parse_mesh(flags.mesh))
    if mode != "continue":
        template_source(model.tokenizer, flags.chat_template)  # fails before any work
        ends = {*model.eos_ids, *stop_ids(model.tokenizer, flags.chat_template)}
        options = dataclasses.replace(options, eos_ids=tuple(sorted(ends)))
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    settings = settings_of(flags, mode, seeds, model)
    check_settings(out, settings)
    path = out / ("samples.jsonl" if mode == "continue" else "messages.jsonl")
    lines = finished_lines(path, flags.batch_size, len(seeds))
    if lines:
        say(f"{len(lines)} of {len(seeds)} seeds are answered already")
    start, before = time.perf_counter(), len(lines)
    news = News(len(seeds), len(lines))
    write_all(Writer(model, flags, mode, options, news), path, seeds, lines)
    seconds = time.perf_counter() - start
    found = sizes(mode, lines)
    if mode == "continue":
        write_token_directory(out, lines)
    made = sizes(mode, lines[before:])["answer_tokens"]
    speed = made / max(seconds, 1e-9)
    engine = {"drafter": flags.drafter, "tree_nodes": model.tree.n_nodes}
    provenance = settings | engine | found | {"date": date.today().isoformat()}
    write_text(out / "provenance.json", json.dumps(provenance, indent=1) + "\n")
    say(
        f"{found['samples']} samples, {found['answer_tokens']} tokens of the model's own, "
        f"{speed:.0f} tokens/s; in {path}"
    )
    for problem, n in found.get("unusable_seeds", {}).items():
        say(f"{n} seeds gave no sample: {problem}")
    return 0


def settings_of(
    flags: argparse.Namespace, mode: str, seeds: Sequence[Any], model: Any
) -> dict[str, Any]:
    """Everything that decides the text. Not the drafter: acceptance is lossless here, so heads
    that exist by now may speed up the rest of a run."""
    import jax

    names = ("prompts", "split", "limit", "chat_template", "temperature", "top_p", "seed",
             "max_new_tokens", "batch_size", "mesh")  # fmt: skip
    digest = hashlib.sha256(repr(seeds).encode()).hexdigest()[:16]
    return {
        "model": flags.model or "demo",
        "mode": mode,
        **{name: getattr(flags, name) for name in names},
        "max_turns": flags.max_turns if mode != "continue" else None,
        "seeds": len(seeds),
        "seeds_sha256": digest,
        "no_repeat_ngram_size": model.no_repeat_ngram_size,
        "dtype": str(model.dtype),
        "platform": jax.default_backend(),
    }


def write_all(
    writer: Writer, path: Path, seeds: Sequence[Any], lines: list[dict[str, Any]]
) -> None:
    """Append the lines of every batch that is missing, a batch at a time, and show how far."""
    with open(path, "a") as file, writer.news.bar:
        for batch in writer.batches(seeds[len(lines) :]):
            file.write("".join(json.dumps(line) + "\n" for line in batch))
            file.flush()
            lines += batch
            writer.news.batch_done(len(batch))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
