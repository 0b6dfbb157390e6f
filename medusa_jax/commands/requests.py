"""Requests of decode.py: a prompt, and the options of the flags."""

import dataclasses
import importlib
import sys
from typing import Any

from medusa_jax.api import Options
from medusa_jax.commands.decode_flags import Flags
from medusa_jax.errors import UserError
from medusa_jax.interop.names import named
from medusa_jax.whole_files import Json, read_text


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
    given["constraint"] = given["constraint"] or None
    return checked(Options(**given), flags.no_repeat_ngram_size)


def checked(options: Options, no_repeat_ngram_size: int | None) -> Options:
    if options.constraint is not None and no_repeat_ngram_size:
        raise UserError(
            "a constraint and --no_repeat_ngram_size may leave no token: give one of them"
        )
    return options


def read_requests(flags: Flags) -> tuple[list[Any], list[Options]]:
    """Prompts (texts, token ids or message lists) and their options, from the flags or a JSONL file."""
    if (flags.prompt is None) == (flags.prompts_file is None):
        raise UserError(
            "give either --prompt TEXT or --prompts_file FILE (or --chat alone, to talk)"
        )
    shared = shared_options(flags)
    if flags.prompts_file:
        file = importlib.import_module("medusa_jax.commands.request_file")
        prompts, options = file.read(flags.prompts_file, shared)
        return prompts, [checked(own, flags.no_repeat_ngram_size) for own in options]
    return [read_stdin() if flags.prompt == "-" else flags.prompt], [shared]


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
