"""The files of a self-distillation: settings that must agree, whole batches, token arrays."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.distill.seeds import Seed
from medusa_jax.errors import UserError
from medusa_jax.heads.vocabulary import covered
from medusa_jax.interop import chat
from medusa_jax.whole_files import write_array, write_json

# Sizes of a draft vocabulary whose share of the text is told.
DRAFT_SIZES = (2048, 4096, 8192, 16384)

# What decides the user turns that a model writes.
USER_TURNS = ("ask", "user_temperature", "user_tokens")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What decides the text of a self-distillation, with the model and the seeds.

    Attributes:
      max_turns: most answers in a conversation.
      user_temperature, user_tokens: of user turns that the model writes.
    """

    model: str | None
    prompts: str | None
    split: str
    limit: int
    ask: int
    chat_template: str
    temperature: float
    top_p: float
    seed: int
    max_new_tokens: int
    max_turns: int
    user_temperature: float
    user_tokens: int
    batch_size: int
    mesh: str


def settings_of(
    asked: TextOptions, mode: str, seeds: Sequence[Any], model: Any
) -> dict[str, Any]:
    """Everything that decides the text. Not the drafter: acceptance is lossless here, so heads
    that exist by now may speed up the rest of a run."""
    import jax

    names = ("prompts", "split", "limit", "chat_template", "temperature", "top_p", "seed",
             "max_new_tokens", "batch_size", "mesh")  # fmt: skip
    digest = hashlib.sha256(repr(seeds).encode()).hexdigest()[:16]
    return {
        "model": asked.model or "demo",
        "mode": mode,
        **{name: getattr(asked, name) for name in names},
        "max_turns": asked.max_turns if mode != "continue" else None,
        **({n: getattr(asked, n) for n in USER_TURNS} if mode == "self_talk" else {}),
        "seeds": len(seeds),
        "seeds_sha256": digest,
        "no_repeat_ngram_size": model.no_repeat_ngram_size,
        "dtype": str(model.dtype),
        "weights": model.storage.weights or str(model.dtype),
        "platform": jax.default_backend(),
    }


def check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Write what decides the text, or refuse to go on with something else.

    Raises:
      UserError: the directory was begun with other settings; names the first difference.
    """
    path = out / "settings.json"
    if path.exists():
        try:
            before = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}): use another --out") from error
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
    write_json(path, settings)


def finished_lines(
    path: Path,
    batch_size: int,
    seeds: Sequence[Seed],
    answers: Callable[[dict[str, Any], Seed], bool],
) -> list[dict[str, Any]]:
    """Samples of an earlier run, whole batches only; the rest of the file is dropped.

    Only whole batches, so that a batch is always decoded with the same neighbours: rounding
    then is the same too, and a resumed file equals an uninterrupted one.

    Args:
      answers: whether a line answers a seed.

    Raises:
      UserError: a line that does not answer the seed in its place; the file is left as it is.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    if len(lines) < len(seeds):
        lines = lines[: len(lines) // batch_size * batch_size]
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            sample = json.loads(line)
            good = number <= len(seeds) and answers(sample, seeds[number - 1])
        except (ValueError, AttributeError):
            good = False
        if not good:
            raise UserError(
                f"{path} is damaged: line {number} is not the answer to seed {number} of "
                f"{len(seeds)}; keep its first {number - 1} lines or use another --out"
            )
        found.append(sample)
    with open(path, "rb+") as file:
        file.truncate(sum(len(line) + 1 for line in lines))
    return found


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
        write_array(directory / f"{name}.npy", array)
    return int(arrays["counted"].sum())


def vocab_counts(
    mode: str, lines: Sequence[dict[str, Any]], model: Any, template: str
) -> np.ndarray:
    """How often the model's own text has each token [V]: those that heads will be trained on."""
    counts_V = np.zeros(model.config.vocab_size, np.int64)
    for line in lines:
        if mode == "continue":
            own = line["token_ids"]
        elif not line["answers"]:
            continue
        else:
            try:
                ids, counted = chat.encode_conversation(
                    model.tokenizer, line["messages"], template, bool(line.get("cut"))
                )
            except chat.SampleError:
                continue  # nothing of it can be trained on
            own = [i for i, is_own in zip(ids, counted) if is_own]
        np.add.at(counts_V, own, 1)
    return counts_V


def coverage(counts_V: np.ndarray) -> str:
    """What the most frequent tokens cover, in a sentence."""
    sizes = [n for n in DRAFT_SIZES if n < counts_V.size] or [counts_V.size]
    shares = [f"{n} {100 * covered(counts_V, n):.2f}%" for n in sizes]
    used = int((counts_V > 0).sum())
    return f"{used} of {counts_V.size} tokens occur; the most frequent cover {', '.join(shares)}"


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
