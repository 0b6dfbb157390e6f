"""decode.py --prompts_file: requests with separate options, a JSON object a line, and their answers."""

import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from medusa_jax import hosts
from medusa_jax.api import Options
from medusa_jax.api.batching import equal_batches
from medusa_jax.api.results import bias_of, constraints
from medusa_jax.console import inform, print_json
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.whole_files import Json, parse_json, read_text

if TYPE_CHECKING:
    from medusa_jax.commands.decode_run import Job

# Other libraries' names for options.
ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "stop_strings": "stop",
    "stop_token_ids": "eos_ids",
    "eos_token_id": "eos_ids",
    "top_logprobs": "logprobs",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
}


# A request has one of these fields.
PROMPTS = ("prompt", "prompt_ids", "messages")


def read(path: str, shared: Options) -> tuple[list[Any], list[Options]]:
    """Prompts (texts, token ids or message lists) and their options.

    Args:
      shared: the options that a request does not set itself.

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
            record = parse_json(line)
            prompts.append(_prompt(record))
            options.append(_options(record, shared))
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
            raise UserError(f"{where} cannot be read: {error}") from error
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    if not prompts:
        raise UserError(f"{path} holds no requests")
    return prompts, options


def _prompt(record: Any) -> str | tuple[int, ...] | list[Any]:
    """The prompt of a line: a text, a tuple of token ids or a list of messages."""
    given = [name for name in PROMPTS if isinstance(record, dict) and name in record]
    if len(given) != 1:
        raise UserError("a request needs one 'prompt', 'prompt_ids' or 'messages'")
    [name] = given
    reader = {"prompt": _exactly(str), "prompt_ids": _ids, "messages": _exactly(list)}[name]
    prompt: str | tuple[int, ...] | list[Any] = _read(name, reader, record[name])
    return prompt


def _options(record: Json, shared: Options) -> Options:
    """The shared options with those that a request sets itself."""
    own = {name: value for name, value in record.items() if name not in PROMPTS}
    for name, value in own.items():
        if name not in READERS:
            near = did_you_mean(name, [*PROMPTS, *READERS], ALIASES)
            near = near or f" (there are: {', '.join([*PROMPTS, *READERS])})"
            raise UserError(f"unknown field {name!r}{near}")
        own[name] = _read(name, READERS[name], value)
    return dataclasses.replace(shared, **own)


def _read(name: str, reader: Callable[[Any], Any], value: Any) -> Any:
    try:
        return reader(value)
    except TypeError as error:
        raise UserError(f"'{name}' cannot be {repr(value)[:80]}") from error


def _exactly(*kinds: type) -> Callable[[Any], Any]:
    """Reads a value of one of these types; a bool is not a number."""

    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError
        return value

    return read


def _ids(value: Any) -> tuple[int, ...]:
    if type(value) is not list or any(type(i) is not int for i in value):
        raise TypeError
    return tuple(value)


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if any(not isinstance(text, str) for text in texts):
        raise TypeError
    return texts


# Readers of the JSON values of options.
READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "seed", "max_steps", "logprobs"), _exactly(int)),
    **dict.fromkeys(
        (
            "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "epsilon", "delta",
        ),
        _exactly(float, int),
    ),
    "stop": _texts,
    "eos_ids": _ids,
    "stop_sequences": lambda value: tuple(_ids(ids) for ids in _exactly(list)(value)),
    "logit_bias": bias_of,
    "constraint": lambda value: value and constraints().constraint_of(value),
}  # fmt: skip


def answer(job: "Job", batch_size: int) -> int:
    """All requests of a file in batches; one JSON object a line, in the order of the file."""
    n = len(job.prompts)
    write = partial(tqdm.write, file=sys.stdout)  # above the progress bar
    with tqdm(total=n, unit="request", disable=None) as bar:
        for number, (ids, rows) in enumerate(equal_batches(n, batch_size)):
            seconds, results = job.compile(rows), job.generate(rows)
            for result in results:
                result.compile_seconds = seconds
            for _, facts in zip(ids, job.facts(rows, results)):
                print_json(facts, write)
            sys.stdout.flush()
            bar.update(len(ids))
            if hosts.asked_to_stop(number):
                done = min((number + 1) * batch_size, n)
                inform(f"stopped by SIGTERM after {done} of {n} requests")
                return 128 + signal.SIGTERM
    return 0
