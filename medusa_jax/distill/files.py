"""Files of a self-distillation run: settings, samples, token arrays, counts."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medusa_jax.distill.seeds import Seed, digest_of
from medusa_jax.errors import UserError
from medusa_jax.heads.vocabulary import COUNTS, covered
from medusa_jax.text import answers
from medusa_jax.text.jinja import SampleError
from medusa_jax.training.data.rows import write_tokens
from medusa_jax.whole_files import Json, read_text

if TYPE_CHECKING:
    from medusa_jax.api.model import Model

# Draft vocabulary sizes whose share of the text is printed.
DRAFT_SIZES = (2048, 4096, 8192, 16384)

# Besides the model, the mode and the seeds, the text depends on these options; user turns that the model writes depend on
# USER_TURNS, too.
TEXT = ("chat_template", "temperature", "top_p", "seed", "max_new_tokens")
USER_TURNS = ("user_temperature", "user_tokens")
# Options that are only noted.
NOTED = ("model", "prompts", "split", "limit", "ask", "batch_size")
SETTINGS = "settings.json"
# Files that a run replaces.
RESULTS = ("messages.jsonl", "samples.jsonl", "provenance.json", COUNTS, "tokens.npy")


def settings_of(
    options: Mapping[str, Any], mode: str, seeds: Sequence[Seed], fingerprint: str
) -> Json:
    """Settings that determine the text. A run with others may not add to its files.

    The drafter is left out: acceptance is lossless here, so a resumed run may use other heads. So is the
    batch size, which changes no text.

    Args:
      options: the command's by name; `TEXT`, `USER_TURNS`, mesh and max_turns among them.
      fingerprint: the model's, or the server and its model.
    """
    return {
        "fingerprint": fingerprint,
        "mode": mode,
        **{name: options[name] for name in TEXT},
        "mesh": ",".join(map(str, options["mesh"])),
        "max_turns": options["max_turns"] if mode != "continue" else None,
        **{name: options[name] if mode == "self_talk" else None for name in USER_TURNS},
        "seeds": len(seeds),
        "seeds_sha256": digest_of(seeds),
    }


def check_settings(out: Path, settings: Json) -> None:
    """Refuse to add to answers that were written with other settings.

    Raises:
      UserError: names all differences.
    """
    path = out / SETTINGS
    if not path.exists():
        if found := [name for name in RESULTS if (out / name).exists()]:
            raise UserError(f"{out} has {found[0]} but no {SETTINGS}: use another --out")
        return
    try:
        stored = dict(json.loads(read_text(path)))
        old = {name: stored[name] for name in settings}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}): use another --out") from error
    samples = [out / name for name in ("messages.jsonl", "samples.jsonl")]
    if not any(file.exists() and file.stat().st_size for file in samples):
        return  # nothing is answered yet
    differences = [
        f"{name} {old[name]!r}, now it is {value!r}"
        for name, value in settings.items()
        if old[name] != value
    ]
    if differences:
        raise UserError(
            f"{out} was started with {'; '.join(differences)}: use the old values or another --out"
        )


def finished_lines(
    path: Path, seeds: Sequence[Seed], answers: Callable[[Json, Seed], bool]
) -> dict[int, Json]:
    """Read the lines of an interrupted run by the number of their seed; removes one that was cut off.

    Args:
      answers: whether a line answers a seed; may raise for one that lacks fields.

    Raises:
      UserError: a line is not the only one that answers its seed; the file is unchanged.
    """
    text, end, _ = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
    by_number = {seed.number: seed for seed in seeds}
    samples: dict[int, Json] = {}
    for number, line in enumerate(text.split(b"\n") if end else (), 1):
        try:
            sample = json.loads(line)
            seed = by_number[sample["seed"]]
            valid = seed.number not in samples and answers(sample, seed)
        except (ValueError, TypeError, LookupError):
            valid = False
        if not valid:
            raise UserError(
                f"{path} is damaged: line {number} is not the answer to one of {len(seeds)} seeds, each "
                f"once; keep its first {number - 1} lines or use another --out"
            )
        samples[seed.number] = sample
    if path.exists():
        os.truncate(path, len(text) + len(end))
    return samples


def write_token_directory(directory: Path, samples: Sequence[Json]) -> None:
    """Write samples as a token directory in which only the model's tokens count."""
    pairs = [(sample["prompt_ids"], sample["token_ids"]) for sample in samples]
    masks = [np.arange(len(p) + len(answer)) >= len(p) for p, answer in pairs]
    write_tokens(directory, [np.array(p + answer, np.int32) for p, answer in pairs], masks)


def vocab_counts(
    mode: str, lines: Sequence[Json], model: "Model", template: str
) -> np.ndarray:
    """Count each token [V] in the text of the model, the training targets of heads."""
    counts_V = np.zeros(model.config.vocab_size, np.int64)
    for line in lines:
        if mode == "continue":
            targets = line["token_ids"]
        elif not line["answers"]:
            continue
        else:
            try:
                ids, mask = answers.encode_conversation(
                    model.tokenizer, line["messages"], template, bool(line.get("cut"))
                )
            except SampleError:
                continue  # unusable for training
            targets = [i for i, counts in zip(ids, mask) if counts]
        np.add.at(counts_V, targets, 1)
    return counts_V


def coverage(counts_V: np.ndarray) -> str:
    """A line about the share of the text that the most frequent tokens cover."""
    sizes = [n for n in DRAFT_SIZES if n < counts_V.size] or [counts_V.size]
    shares = [f"the top {n} cover {100 * covered(counts_V, n):.2f}%" for n in sizes]
    n_used = int((counts_V > 0).sum())
    return f"{n_used} of {counts_V.size} tokens occur; {', '.join(shares)}"


def sizes(mode: str, lines: Sequence[Json]) -> Json:
    """Counts for the report."""
    if mode == "continue":
        tokens = sum(len(line["token_ids"]) for line in lines)
        return {"samples": len(lines), "answer_tokens": tokens}
    answers = [answer for line in lines for answer in line["answers"]]
    problems: dict[str, int] = {}
    for line in lines:
        if not line["answers"]:
            problems[line["problem"]] = problems.get(line["problem"], 0) + 1
    steps = sum(a["steps"] for a in answers)
    tokens = sum(a["tokens"] for a in answers)
    return {
        "samples": sum(bool(line["answers"] and line["messages"]) for line in lines),
        "unusable_seeds": problems,
        "answers": len(answers),
        "answers_cut": sum(a["finish"] != "stop" for a in answers),
        "answer_tokens": tokens,
        # Prefill gives the first token of an answer.
        "mean_accepted_length": round((tokens - len(answers)) / steps, 3)
        if steps
        else None,
    }
