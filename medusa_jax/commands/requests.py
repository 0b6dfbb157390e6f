"""Requests of decode.py: a prompt, and the options of the flags."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from medusa_jax.api import Options, find_model
from medusa_jax.commands.decode_flags import NOTHING_ASKED, Flags
from medusa_jax.errors import UserError
from medusa_jax.files.known import named_model
from medusa_jax.files.text_defaults import text_defaults
from medusa_jax.whole_files import Json, read_text


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
        from medusa_jax.commands.request_file import read_file

        return read_file(flags.prompts_file, options)
    if flags.prefix_file is not None:
        from medusa_jax.text.fill import Gap

        suffix = "" if flags.suffix_file is None else read_text(flags.suffix_file)
        return [Gap(read_text(flags.prefix_file), suffix)], [options]
    if flags.prompt == "-":  # without a byte order mark
        return [sys.stdin.read().lstrip("\ufeff")], [options]
    return [flags.prompt], [options]
