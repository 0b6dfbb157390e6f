"""The messages of a chat, as turns that chat templates expect."""

from contextlib import suppress
from typing import Any

from medusa_jax.serving.http.fields import BodyFields
from medusa_jax.text.chat import MESSAGE_ROLES
from medusa_jax.whole_files import Json, parse_json

ROLES = {**MESSAGE_ROLES, "tool": "tool"}
# Fields that OpenAI's client sends back with an answer, with their neutral values.
NEUTRAL: Json = {"annotations": [[]], "audio": [], "function_call": [], "refusal": []}
NEUTRAL["prefix"] = [True, False]  # other servers mark a turn to be continued


def read_messages(fields: BodyFields) -> list[Json]:
    """Return the turns of a body; content is text, and arguments of tool calls are objects.

    Raises:
      HttpError: no turns, or content other than text.
    """
    turns = [_turn(turn) for turn in fields.each("messages", "a list of turns", NEUTRAL)]
    last = turns[-1] if turns else {"role": ""}
    if last["role"] not in ("user", "tool", "assistant") or "tool_calls" in last:
        problem = "should be a list of turns; after the last one the assistant can write"
        raise fields.refused("messages", problem)
    return turns


def _turn(fields: BodyFields) -> Json:
    role = fields.text("role")
    if role not in ROLES:
        raise fields.refused("role", f"is unknown: {role!r}")
    calls, refusal = [], ""
    if role == "assistant":
        calls = [_call(call) for call in fields.each("tool_calls", "a list of calls")]
        refusal = fields.text("refusal")
    content = content_of(fields, optional=bool(calls or refusal)) or refusal
    turn: Json = {"role": ROLES[role], "content": content}
    for name in ("name", "reasoning_content"):  # some templates write them
        if text := fields.text(name):
            turn[name] = text
    fields.text("tool_call_id")
    return turn | ({"tool_calls": calls} if calls else {})


def content_of(fields: BodyFields, name: str = "content", optional: bool = False) -> str:
    """Return the text of a field, which may be in parts; "" if an optional one is absent."""
    content = fields.take(name, (str, list), "text, or parts of text", None)
    if content is None and not optional:
        raise fields.refused(name, "is missing")
    if isinstance(content, list):
        return "".join(_part(part) for part in fields.each(name, ""))
    return content or ""


def _part(fields: BodyFields) -> str:
    kind = fields.text("type", "text")
    name = "refusal" if kind == "refusal" else "text"
    text = fields.text(name, None)
    for name in ("annotations", "logprobs"):  # of an answer that comes back
        fields.take(name, (list,), "a list", [])
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise fields.refused("type", f"is {kind!r}: the model reads text alone")
    if text is None:
        raise fields.refused(name, "is missing")
    return str(text)


def _call(fields: BodyFields) -> Json:
    """Return a tool call. Missing or blank arguments become {}, since templates print an object."""
    function = fields.inside("function")
    name = function.text("name")
    fields.text("id")
    fields.whole("index", 0, 0)
    if fields.text("type", "function") != "function" or not name:
        raise fields.refused("function", "should have a 'name'")
    arguments: Any = function.take("arguments", (str, dict), "an object of JSON", "")
    if isinstance(arguments, str):
        with suppress(ValueError):  # then it stays text
            arguments = parse_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        problem = "are not an object of JSON, and may be cut"
        raise function.refused("arguments", f"of the call of {name!r} {problem}")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
