"""Requests of decode.py: one prompt, or a file of requests with separate options."""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from medusa_jax.api import Options
from medusa_jax.api.results import ALIASES, bias_of, constraints
from medusa_jax.commands.decode_flags import Flags
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.interop.names import named
from medusa_jax.whole_files import Json, parse_json, read_text

# The fields of which a request has one.
PROMPTS = ("prompt", "prompt_ids", "messages")


def shared_options(flags: Flags) -> Options:
    """The options of every request: from the flags, else from the model's name."""
    row = named(flags.model)
    given = {
        field.name: getattr(flags, field.name)
        for field in dataclasses.fields(Options)
        if hasattr(flags, field.name)
    }
    given |= {"stop": tuple(flags.stop), "stop_sequences": tuple(flags.stop_sequence)}
    for name, default in {"temperature": 0.0, "top_p": 1.0}.items():
        if given[name] is None:
            given[name] = row.sampling.get(name, default) if row else default
    if flags.constraint:
        kind, _, value = flags.constraint.partition(":")
        if kind in ("json_schema", "grammar"):
            value = read_text(value, f"{value!r} of --constraint")
        made: Json = {"json_object": True, "choice": value.split("|")}
        given["constraint"] = {kind: made.get(kind, value)}
    return _checked(flags, Options(**given | {"constraint": given["constraint"] or None}))


def _checked(flags: Flags, options: Options) -> Options:
    if options.constraint is not None and flags.no_repeat_ngram_size:
        raise UserError(
            "a constraint and --no_repeat_ngram_size may leave no token: give one of them"
        )
    return options


def read_requests(flags: Flags) -> tuple[list[Any], list[Options]]:
    """Prompts (texts, token ids or message lists) and their options, from the flags or a JSONL file."""
    path = flags.prompts_file
    if (flags.prompt is None) == (path is None):
        raise UserError(
            "give either --prompt TEXT or --prompts_file FILE (or --chat alone, to talk)"
        )
    shared = shared_options(flags)
    if path is None:
        return [read_stdin() if flags.prompt == "-" else flags.prompt], [shared]
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
            options.append(_checked(flags, _options(record, shared)))
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
            raise UserError(f"{where} cannot be read: {error}") from error
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    if not prompts:
        raise UserError(f"{path} holds no requests")
    return prompts, options


def read_stdin() -> str:
    """All of standard input.

    Raises:
      UserError: it is closed, or not text.
    """
    try:
        return sys.stdin.read().lstrip("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is closed" if isinstance(error, OSError) else error
        raise UserError(f"cannot read standard input: {why}") from error


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


# The options of a request, each with what reads its JSON value.
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
