"""Requests of decode.py: one prompt, or a file of requests with separate options."""

import json
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from medusa_jax.api import Options
from medusa_jax.api.results import ALIASES, bias_of, constraints
from medusa_jax.commands.decode_flags import Flags
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.interop.names import named
from medusa_jax.whole_files import Json, parse_json, read_text

if TYPE_CHECKING:
    from medusa_jax.constraints import Constraint

# What a request continues or answers, one of these.
PROMPTS = ("prompt", "prompt_ids", "messages")
# Options that have the flag's value.
UNCHANGED = (
    "max_new_tokens", "top_k", "min_p", "seed", "max_steps", "logprobs", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "epsilon", "delta",
)  # fmt: skip


def shared_options(flags: Flags) -> Json:
    """The options of every request: from the flags, else from the model's name."""
    row = named(flags.model)
    brought = row.sampling if row else {}
    return {name: getattr(flags, name) for name in UNCHANGED} | {
        "temperature": _first(flags.temperature, brought.get("temperature"), 0.0),
        "top_p": _first(flags.top_p, brought.get("top_p"), 1.0),
        "stop": tuple(flags.stop),
        "eos_ids": flags.eos_ids,
        "stop_sequences": tuple(flags.stop_sequence),
        "logit_bias": _biases(flags.logit_bias),
        "constraint": _constraint(flags.constraint),
    }


def _biases(text: str) -> tuple[tuple[int, float], ...]:
    """ "15=-100,7=2.5" -> ((15, -100.0), (7, 2.5))."""
    try:
        pairs = [part.split("=") for part in text.split(",")] if text else []
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError as error:
        raise UserError(
            f"--logit_bias is a list like 15=-100,7=2.5, not {text!r}"
        ) from error


def _constraint(text: str) -> "Constraint | None":
    """The constraint of --constraint; "choice:yes|no" has two choices."""
    if not text:
        return None
    kind, _, value = text.partition(":")
    if kind in ("json_schema", "grammar"):
        value = read_text(value, f"{value!r} of --constraint")
    made: Json = {"json_object": True, "choice": value.split("|")}
    constraint: Constraint = constraints().constraint_of({kind: made.get(kind, value)})
    return constraint


def _first(*values: float | None) -> float:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def read_requests(flags: Flags) -> tuple[list[Any], list[Options]]:
    """Prompts (texts, token ids or message lists) and their options, from the flags or a JSONL file."""
    path = flags.prompts_file
    if (flags.prompt is None) == (path is None):
        raise UserError(
            "give either --prompt TEXT or --prompts_file FILE (or --chat alone, to talk)"
        )
    shared = shared_options(flags)
    if path is None:
        text = read_stdin() if flags.prompt == "-" else flags.prompt
        return [text], [_one(flags, shared)]
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    lines = read_text(path).split("\n")
    prompts, options = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = parse_json(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
            raise UserError(f"{where} cannot be read: {error}") from error
        try:
            prompts.append(_prompt(record))
            check_fields(record, shared)
            options.append(_one(flags, shared | own_options(record, shared)))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    if not prompts:
        raise UserError(f"{path} holds no requests")
    return prompts, options


def _one(flags: Flags, fields: dict[str, Any]) -> Options:
    """The options of one request."""
    options = Options(**fields)
    if options.constraint is not None and flags.no_repeat_ngram_size:
        raise UserError(
            "a constraint and --no_repeat_ngram_size may leave no token: give one of them"
        )
    return options


def read_stdin() -> str:
    """All of standard input.

    Raises:
      UserError: it is closed, or no text.
    """
    try:
        return sys.stdin.read().lstrip("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is closed" if isinstance(error, OSError) else error
        raise UserError(f"cannot read standard input: {why}") from error


def check_fields(record: Json, options: Collection[str]) -> None:
    """Refuse unknown fields of a request.

    Raises:
      UserError: one that is unknown, or a second prompt.
    """
    known = (*PROMPTS, *options)
    if wrong := next((name for name in record if name not in known), None):
        near = did_you_mean(wrong, known, ALIASES) or f" (there are: {', '.join(known)})"
        raise UserError(f"unknown field {wrong!r}{near}")
    given = [name for name in PROMPTS if name in record]
    if len(given) > 1:
        raise UserError(f"a request has one prompt, not both {given[0]!r} and {given[1]!r}")


def _prompt(record: Any) -> str | tuple[int, ...] | list[Any]:
    """The one prompt of a line: a text, a tuple of token ids or a list of messages."""
    given = [name for name in PROMPTS if isinstance(record, dict) and name in record]
    if not given:
        raise UserError("a request needs a 'prompt', 'prompt_ids' or 'messages'")
    value = record[given[0]]
    if given[0] == "prompt" and not isinstance(value, str):
        raise UserError(f"'prompt' must be text, not {value!r}")
    if given[0] == "messages" and not isinstance(value, list):
        raise UserError("'messages' must be a list of turns")
    if given[0] == "prompt_ids":
        return _ids(value, "'prompt_ids' must be a list of token ids")
    return value


def own_options(record: Json, shared: Json) -> Json:
    """The options that one request sets itself, each of the type of the flag it replaces."""
    own = {name: record[name] for name in shared if name in record}
    if "stop" in own:
        stop = own["stop"]
        own["stop"] = (stop,) if isinstance(stop, str) else stop
        if not isinstance(own["stop"], list | tuple) or any(
            not isinstance(s, str) for s in own["stop"]
        ):
            raise UserError(f"'stop' must be a string or a list of strings, not {stop!r}")
        own["stop"] = tuple(own["stop"])
    if "eos_ids" in own:
        own["eos_ids"] = _ids(own["eos_ids"], "'eos_ids' must be a list of token ids")
    if "stop_sequences" in own:
        problem = "'stop_sequences' must be a list of lists of token ids"
        if not isinstance(own["stop_sequences"], list):
            raise UserError(f"{problem}, not {own['stop_sequences']!r}")
        own["stop_sequences"] = tuple(_ids(ids, problem) for ids in own["stop_sequences"])
    if "logit_bias" in own:
        own["logit_bias"] = bias_of(own["logit_bias"])
    if own.get("constraint") is not None:
        own["constraint"] = constraints().constraint_of(own["constraint"])
    for name, value in own.items():
        if name in ("eos_ids", "stop_sequences", "logit_bias", "constraint"):
            continue
        kind = (
            int if shared[name] is None else type(shared[name])
        )  # None: a number left out
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise UserError(f"'{name}' must be {kinds[-1].__name__}, not {value!r}")
    return own


def _ids(value: Any, problem: str) -> tuple[int, ...]:
    """A JSON list of whole numbers, or a UserError that begins with `problem`."""
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise UserError(f"{problem}, not {value!r}")
    return tuple(value)
