"""`python -m medusa_jax.distill`: the model answers seed prompts, heads learn from the answers.

Heads are trained on what they will have to guess: the model's own output (Medusa 2.3.2). Every
prompt of a JSONL file is continued; the output directory then holds

    samples.jsonl     one finished sample a line: prompt_ids, token_ids (the resume point)
    tokens.npy, doc_starts.npy, counted.npy
                      the same as a token directory for training; prompts are not counted
    provenance.json   model, sampling and sizes

A run that was stopped goes on behind the last complete line.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.cli.flags import (
    add_generation,
    add_model,
    add_prompts,
    command,
    run_command,
)
from medusa_jax.console import say
from medusa_jax.errors import UserError

EXAMPLES = """examples:
  python -m medusa_jax.distill --prompts seeds.jsonl --out work/answers
  python -m medusa_jax.distill --model path/to/model --prompts seeds.jsonl --out work/answers \\
      --temperature 0.3 --max_new_tokens 512 --batch_size 16
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax.distill",
        "Let a model continue prompts and write a training set of its own text.",
        EXAMPLES,
    )
    add_prompts(p, limit=0)
    p.add_argument("--out", required=True, help="directory to write")
    add_model(p, drafter="none")
    p.add_argument("--tree", default="auto", help="as for decode.py")
    add_generation(p)
    p.add_argument("--top_p", type=float, default=1.0)
    p.add_argument("--batch_size", type=int, default=32)
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


def finished_samples(path: Path) -> list[dict[str, Any]]:
    """Complete lines of an earlier run; a line cut off by a kill is dropped from the file."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    if whole:
        whole += b"\n"
    if len(whole) != path.stat().st_size:
        with open(path, "rb+") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def answer(
    model: Any, prompts: Sequence[Any], options: Any, batch_size: int, first_seed: int
) -> Iterator[list[dict[str, Any]]]:
    """Continue prompts in batches of equal size; yields the samples of each batch.

    Every prompt has a seed of its own, so a batch's make-up does not change its text.
    """
    for start in range(0, len(prompts), batch_size):
        batch = list(prompts[start : start + batch_size])
        seeds = range(first_seed + start, first_seed + start + batch_size)
        rows = [dataclasses.replace(options, seed=seed) for seed in seeds]
        padded = batch + [batch[-1]] * (batch_size - len(batch))  # one compiled shape
        results = model.generate(padded, rows)[: len(batch)]
        yield [
            {"prompt_ids": model.encode(p), "token_ids": r.token_ids}
            for p, r in zip(batch, results)
        ]


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


def run(flags: argparse.Namespace) -> int:
    """Answer all prompts that are not answered yet."""
    from tqdm import tqdm

    from medusa_jax.api import Options, load
    from medusa_jax.console import use_compilation_cache

    use_compilation_cache()
    records = read_prompts(flags.prompts, flags.limit)
    options = Options(
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        seed=flags.seed,
    )
    tree = "none" if flags.drafter == "none" else flags.tree
    model = load(flags.model, flags.drafter, tree=tree, dtype=flags.dtype)
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    done = finished_samples(out / "samples.jsonl")
    if done:
        say(f"{len(done)} of {len(records)} prompts are answered already")
    room = model.config.max_position - 1
    prompts = [r.get("prompt_ids", r.get("prompt")) for r in records]
    prompts = [p[:room] if isinstance(p, list) else p for p in prompts]
    start, made = time.perf_counter(), 0
    with (
        open(out / "samples.jsonl", "a") as file,
        tqdm(total=len(records), initial=len(done), unit="prompt", disable=None) as bar,
    ):
        todo = prompts[len(done) :]
        first_seed = flags.seed + len(done)
        for samples in answer(model, todo, options, flags.batch_size, first_seed):
            file.write("".join(json.dumps(s) + "\n" for s in samples))
            file.flush()
            done += samples
            made += sum(len(s["token_ids"]) for s in samples)
            bar.update(len(samples))
    counted = write_token_directory(out, done)
    provenance = {
        "model": flags.model or "demo",
        "prompts": flags.prompts,
        "samples": len(done),
        "answer_tokens": counted,
        **dataclasses.asdict(options),
    }
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    speed = made / max(time.perf_counter() - start, 1e-9)
    say(
        f"{len(done)} samples, {counted} tokens of the model's own, {speed:.0f} tokens/s; in {out}"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
