"""Conversations with tools: rendered by the model's chat template, and the form of its calls."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_jax.errors import UserError
from medusa_jax.interop.chat import MESSAGE_ROLES, render, template_source, tokenize
from medusa_jax.interop.literal_text import literal_text
from medusa_jax.interop.tokenizer import Tokenizer
from medusa_jax.whole_files import Json


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call: begin, {"name": ..., <arguments>: {...}}, end.

    Attributes:
      begin, end: the text around a call.
      arguments: the key of the arguments.
      between: the text between two calls; None: at most one call.
    """

    begin: str
    end: str
    arguments: str
    between: str | None


# By a mark in the template; the first that occurs counts.
FORMS = {
    "<tool_call>": CallForm("<tool_call>\n", "\n</tool_call>", "arguments", "\n"),
    '"parameters"': CallForm("", "", "parameters", None),
}


def call_form(tokenizer: Tokenizer, template_name: str = "") -> CallForm:
    """The form of calls that the template asks the model for.

    Raises:
      UserError: it knows no tools, or calls of another form.
    """
    source = template_source(tokenizer, template_name, tools=True)
    if "tools" not in source:
        raise UserError("the model's chat template knows no tools")
    for mark, form in FORMS.items():
        if mark in source:
            return form
    raise UserError(
        "the model's chat template writes tool calls in a form that is not known here (known are "
        "those of Hermes and Qwen, and of Llama 3)"
    )


def encode_with_tools(
    tokenizer: Tokenizer,
    messages: object,
    tools: Sequence[Json],
    template_name: str = "",
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """As `chat.encode_prompt`, of turns that may call tools or give their results.

    Raises:
      UserError: malformed messages, or as for `encode_prompt`.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError("messages should be a list of turns, with at least one")
    turns = [_turn(turn) for turn in messages]
    if turns[-1]["role"] not in ("user", "tool"):
        raise UserError("messages: the last turn has to be the user's, or a tool's")
    literal, fields = literal_text(tokenizer), {"messages": turns, "tools": list(tools)}
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    _mapped(fields, note)
    hidden = literal.hide([{"content": text} for text in texts])
    if hidden:
        stand_ins = iter(hidden)
        fields = _mapped(fields, lambda text: next(stand_ins)["content"])
    source = template_source(tokenizer, template_name, bool(fields["tools"]))
    text, _ = render(
        source,
        fields["messages"],
        tokenizer.special_texts,
        add_generation_prompt=True,
        tools=fields["tools"] or None,
    )
    check(literal.show(text) if hidden else text)
    return tokenize(tokenizer, text, hidden is not None)[0]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with all of its strings changed, field names unchanged."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(one, change) for one in value]
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    return value


def _turn(turn: object) -> Json:
    """One turn as templates expect it: arguments of calls are objects."""
    turn = turn if isinstance(turn, dict) else {}
    role = turn.get("role")
    if role not in (*MESSAGE_ROLES, "tool"):
        raise UserError(f"messages: unknown role {role!r}")
    content, calls = turn.get("content"), turn.get("tool_calls")
    if isinstance(content, list):
        content = "".join(p.get("text", "") for p in content if isinstance(p, dict))
    if not isinstance(content or "", str) or (content is None and not calls):
        raise UserError("messages: a turn without 'content'")
    read = {"role": MESSAGE_ROLES.get(role, role), "content": content or ""}
    if role == "tool" and isinstance(turn.get("name"), str):
        read["name"] = turn["name"]
    if role != "assistant" or not calls:
        return read
    try:
        made = [
            {"type": "function", "function": _function(call["function"])} for call in calls
        ]
    except (TypeError, KeyError, ValueError) as error:
        problem = "messages: 'tool_calls' are functions with a name and arguments in JSON"
        raise UserError(problem) from error
    return {**read, "tool_calls": made}


def _function(function: Json) -> Json:
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"name": str(function["name"]), "arguments": arguments}
