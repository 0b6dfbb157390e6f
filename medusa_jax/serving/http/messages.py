"""The messages of a chat, as turns that chat templates expect."""

import json
from contextlib import suppress
from typing import Any

from medusa_jax.interop.chat import MESSAGE_ROLES
from medusa_jax.serving.http.fields import Fields
from medusa_jax.whole_files import Json

ROLES = {**MESSAGE_ROLES, "tool": "tool"}
# What OpenAI's client sends back of an answer, where it says nothing.
NEUTRAL: Json = {"annotations": [[]], "audio": [], "function_call": [], "refusal": []}


def read_messages(fields: Fields) -> list[Json]:
    """The turns of a body. Content is text, and the arguments of tool calls are objects.

    Raises:
      Refused: no turns, or something that is no text.
    """
    turns = [_turn(one) for one in fields.each("messages", "a list of turns", NEUTRAL)]
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        problem = "should be a list of turns, the last one the user's or a tool's"
        raise fields.refused("messages", problem)
    return turns


def _turn(fields: Fields) -> Json:
    role = fields.text("role")
    if role not in ROLES:
        raise fields.refused("role", f"is unknown: {role!r}")
    calls = []
    if role == "assistant":
        calls = [_call(one) for one in fields.each("tool_calls", "a list of calls")]
    content = fields.take("content", (str, list), "text, or parts of text", None)
    if content is None and not calls:
        raise fields.refused("content", "is missing")
    if isinstance(content, list):
        content = "".join(_part(part) for part in fields.each("content", ""))
    read: Json = {"role": ROLES[role], "content": content or ""}
    for name in ("name", "reasoning_content"):  # some templates write them
        if text := fields.text(name):
            read[name] = text
    fields.text("tool_call_id")
    return read | ({"tool_calls": calls} if calls else {})


def _part(fields: Fields) -> str:
    kind, text = fields.text("type", "text"), fields.body.get("text")
    if kind != "text":
        raise fields.refused("type", f"is {kind!r}: the model reads text alone")
    if text is None:
        raise fields.refused("text", "is missing")
    return str(fields.text("text"))


def _call(fields: Fields) -> Json:
    """A call of a tool; arguments may be missing or blank, but templates print an object."""
    function = fields.inside("function")
    name = function.text("name")
    fields.text("id"), fields.whole("index", 0, 0)
    if fields.text("type", "function") != "function" or not name:
        raise fields.refused("function", "should have a 'name'")
    arguments: Any = function.take("arguments", (str, dict), "an object of JSON", "")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # then it is still text
            arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        problem = "are no object of JSON, and may be cut"
        raise function.refused("arguments", f"of the call of {name!r} {problem}")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
