"""The messages of a chat, as turns that chat templates expect."""

import json
from contextlib import suppress
from typing import Any

from medusa_jax.interop.chat import MESSAGE_ROLES
from medusa_jax.serving.http.fields import Fields
from medusa_jax.serving.http.refused import Refused
from medusa_jax.whole_files import Json

ROLES = {**MESSAGE_ROLES, "tool": "tool"}
# What OpenAI's client sends back of an answer, where it says nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}


def read_messages(fields: Fields) -> list[Json]:
    """The turns of a body. Content is text, and the arguments of tool calls are objects.

    Raises:
      Refused: no turns, or something that is no text.
    """
    given = fields.take("messages", (list,), "a list of turns", [])
    if not given:
        raise fields.refused("messages", "should be a list of turns, with at least one")
    turns = [_turn(one, f"messages[{i}]") for i, one in enumerate(given)]
    if turns[-1]["role"] not in ("user", "tool"):
        raise fields.refused("messages", "should end with a turn of the user or a tool")
    return turns


def _turn(turn: Any, where: str) -> Json:
    fields = Fields(turn, where, neutral=NEUTRAL)
    role = fields.text("role")
    if role not in ROLES:
        raise fields.refused("role", f"is unknown: {role!r}")
    read: Json = {"role": ROLES[role]}
    calls = []
    if role == "assistant":
        given = fields.take("tool_calls", (list,), "a list of calls", [])
        calls = [_call(one, f"{where}.tool_calls[{i}]") for i, one in enumerate(given)]
    content = fields.take("content", (str, list), "text, or parts of text", None)
    if content is None and not calls:
        raise fields.refused("content", "is missing")
    if isinstance(content, list):
        parts = enumerate(content)
        content = "".join(_part(part, f"{where}.content[{i}]") for i, part in parts)
    read["content"] = content or ""
    for name in ("name", "reasoning_content"):  # some templates write them
        if text := fields.text(name):
            read[name] = text
    fields.text("tool_call_id")
    fields.finish()
    return read | ({"tool_calls": calls} if calls else {})


def _part(part: Any, where: str) -> str:
    fields = Fields(part, where)
    kind = fields.text("type", "text")
    if kind != "text":
        raise fields.refused("type", f"is {kind!r}: the model reads text alone")
    text: str | None = fields.text("text", None)
    if text is None:
        raise fields.refused("text", "is missing")
    fields.finish()
    return text


def _call(call: Any, where: str) -> Json:
    """A call of a tool. Templates print its arguments, which may be missing or blank, as an object."""
    fields = Fields(call, where)
    fields.text("id")
    fields.whole("index", 0, 0)
    if fields.text("type", "function") != "function":
        raise fields.refused("type", "should be 'function'")
    function = fields.inside("function")
    name = function.text("name")
    if not name:
        raise fields.refused("function", "should have a 'name'")
    given = function.take("arguments", (str, dict), "an object of JSON, as text", "")
    for one in (fields, function):
        one.finish()
    arguments: Any = given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):  # still a text
            arguments = json.loads(given) if given.strip() else {}
    if not isinstance(arguments, dict):
        problem = f"of the call of {name!r} should be an object of JSON, and may be cut"
        raise Refused(400, f"{where!r}: the arguments {problem}", "messages")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
