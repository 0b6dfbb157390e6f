"""Requests of decode.py: prompts, and the options of the flags or of a file's lines."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

from medusa_jax import typed
from medusa_jax.api import Options, find_model
from medusa_jax.commands.decode_flags import NOTHING_ASKED, Flags
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.files.known import named_model
from medusa_jax.files.text_defaults import text_defaults
from medusa_jax.whole_files import Json, parse_json, read_text

# Prompt fields and their types; a request has exactly one.
PROMPTS: dict[str, Any] = {"prompt": str, "prompt_ids": tuple[int, ...], "messages": list}


def sampling_defaults(model: str | None) -> dict[str, Any]:
    """The sampling that a model's publisher recommends, {} if it is greedy or not named."""
    if row := named_model(model):
        return dict(row.sampling)
    return text_defaults(find_model(model)).sampling


def shared_options(flags: Flags, defaults: Mapping[str, Any] | None = None) -> Options:
    """The options of every request: from the flags, else `defaults`, else those of `Options`."""
    pairs = ((f.name, getattr(flags, f.name, None)) for f in dataclasses.fields(Options))
    fields = {name: value for name, value in pairs if value is not None}
    fields["stop"] = tuple(flags.stop)
    if flags.constraint:
        kind, _, value = flags.constraint.partition(":")
        if kind == "json_object" and value:
            raise UserError("json_object takes no value: json_schema:FILE is for a schema")
        if kind in ("json_schema", "grammar"):
            value = read_text(value, f"{value!r} of --constraint")
        values: Json = {"json_object": True, "choice": value.split("|")}
        fields["constraint"] = {kind: values.get(kind, value)}
    fields["constraint"] = fields["constraint"] or None
    return Options(**dict(defaults or {}) | fields)


def read_requests(flags: Flags) -> tuple[list[Any], list[Options]]:
    """Prompts (texts, token ids, message lists or gaps) and their options, from the flags or a JSONL file."""
    if flags.prompt is None and flags.prompts_file is None and flags.prefix_file is None:
        raise UserError(NOTHING_ASKED)
    options = shared_options(flags)
    if flags.prompts_file:
        return read_file(flags.prompts_file, options)
    if flags.prefix_file is not None:
        from medusa_jax.text.fill import Gap

        suffix = "" if flags.suffix_file is None else read_text(flags.suffix_file)
        return [Gap(read_text(flags.prefix_file), suffix)], [options]
    if flags.prompt == "-":  # without a byte order mark
        return [sys.stdin.read().lstrip("\ufeff")], [options]
    return [flags.prompt], [options]


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
