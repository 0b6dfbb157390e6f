"""decode.py --prompts_file: requests with separate options, a JSON object a line, and their answers."""

import dataclasses
import json
import sys
import time
from functools import partial
from typing import Any

from tqdm import tqdm

from medusa_jax import hosts, typed
from medusa_jax.api import Options
from medusa_jax.api.prompts import equal_batches
from medusa_jax.commands.decode_job import DecodeJob
from medusa_jax.console import inform, print_json
from medusa_jax.errors import Terminated, UserError, did_you_mean
from medusa_jax.progress import ProgressBar
from medusa_jax.whole_files import Json, parse_json, read_text

# Prompt fields and their types; a request has exactly one.
PROMPTS: dict[str, Any] = {"prompt": str, "prompt_ids": tuple[int, ...], "messages": list}


def read_file(path: str, defaults: Options) -> tuple[list[Any], list[Options]]:
    """Prompts (texts, token ids or message lists) and their options.

    Args:
      defaults: the options that a request does not set itself.

    Raises:
      UserError: names the line.
    """
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    lines = read_text(path).split("\n")
    prompts, options = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            prompt, fields = _request(parse_json(line))
            prompts.append(prompt)
            options.append(dataclasses.replace(defaults, **fields))
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error.msg}") from error
        except ValueError as error:  # numbers too long, lists too deep
            raise UserError(f"{where} cannot be read: {error}") from error
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    if not prompts:
        raise UserError(f"{path} holds no requests")
    return prompts, options


def _request(record: Any) -> tuple[Any, Json]:
    """The prompt of a line (a text, a tuple of token ids or a list of messages) and its options."""
    if not isinstance(record, dict) or len(PROMPTS.keys() & record.keys()) != 1:
        raise UserError("a request needs one 'prompt', 'prompt_ids' or 'messages'")
    names = [*PROMPTS, *(field.name for field in dataclasses.fields(Options))]
    for name in record:
        if name not in names:
            hint = did_you_mean(name, names) or f" (there are: {', '.join(names)})"
            raise UserError(f"unknown field {name!r}{hint}")
    [name] = PROMPTS.keys() & record.keys()
    value = record.pop(name)
    return typed.read(f"'{name}'", value, PROMPTS[name]), record


def answer_file(job: DecodeJob, *, batch_size: int, show_drafts: bool) -> int:
    """All requests of a file in batches; one JSON object a line, in the order of the file.

    Args:
      show_drafts: add `accepted_lengths` and `draft_depths`.
    """
    n, began, compiling = len(job.prompts), time.perf_counter(), 0.0
    tokens = steps = 0
    write = partial(tqdm.write, file=sys.stdout)  # above the progress bar
    with ProgressBar("answers", n, "request", shown=hosts.first()) as bar:
        bar.update(0, "compiling and decoding")
        for number, (ids, rows) in enumerate(equal_batches(n, batch_size)):
            results = job.generate(rows)
            compiling += results[0].compile_seconds
            for _, result, facts in zip(ids, results, job.facts(rows, results)):
                tokens, steps = tokens + result.new_tokens, steps + result.steps
                if show_drafts:
                    facts["draft_depths"] = result.draft_depths
                else:
                    del facts["accepted_lengths"]
                print_json(facts, write)
            sys.stdout.flush()
            bar.update(len(ids), "")
            if hosts.asked_to_stop(number):
                raise Terminated
    spent = time.perf_counter() - began
    inform(
        f"{n} requests, {tokens} tokens in {spent:.1f} s ({compiling:.1f} s of compilation), "
        f"{tokens / max(spent - compiling, 1e-9):.0f} tokens/s, mean accepted length "
        f"{(tokens - n) / max(steps, 1):.2f}"
    )
    return 0
