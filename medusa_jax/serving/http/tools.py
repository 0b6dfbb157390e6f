"""`tools` and `tool_choice`: what a model may call, and what of its text is a call."""

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from medusa_jax.constraints import Constraint
from medusa_jax.constraints.grammars import BLANKS
from medusa_jax.constraints.schemas import served_schema
from medusa_jax.errors import UserError
from medusa_jax.interop.tool_chat import CallForm
from medusa_jax.serving.http.fields import Fields
from medusa_jax.serving.http.refused import Refused

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# What a call begins with, up to its arguments.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"(\w+)"\s*:\s*')
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tools:
    """The tools of a call.

    Attributes:
      given: as the client sent them, for the template.
      callable: by name the schemas of the arguments of those that may be called.
      must: whether one has to be.
      many: whether several may be.
    """

    given: list[dict[str, Any]]
    callable: dict[str, Any]
    must: bool
    many: bool

    def constraint(self, form: CallForm) -> Constraint:
        """Calls as their schemas allow them, and free text where none has to be made."""
        names = [f"tool_{i}" for i in range(len(self.callable))]
        rules = [f"call: {json.dumps(form.begin)} tool {json.dumps(form.end)}"]
        if not form.begin:
            rules = ["call: tool"]
        more = self.many and form.between is not None
        if self.must:
            after = f" ({json.dumps(form.between)} call)*" if more else ""
            start = f"start: call{after}"
        elif form.begin:
            mark = form.begin.rstrip("\n")
            rest = form.begin[len(mark) :]
            rules = [
                f"lead[lazy]: FREE {json.dumps(mark)}",
                f"call: lead {json.dumps(rest)} tool {json.dumps(form.end)}",
                r"FREE: /(.|\n)*/",
            ]
            start = "start: call* FREE" if more else "start: FREE | call"
        else:
            rules.append(r"FREE: /([^{ \n](.|\n)*)?/")
            start = "start: FREE | call"
        rules.append("tool: " + " | ".join(names))
        for name, (function, schema) in zip(names, self.callable.items()):
            before = f'{{"name": "{function}", "{form.arguments}": '
            rules.append(f'{name}: {json.dumps(before)} args_{name} "}}"')
            bounded = {**schema, "x-guidance": {"whitespace_pattern": BLANKS}}
            rules.append(f"args_{name}: %json {json.dumps(bounded)}")
        return Constraint("tools", "\n".join([start, *rules, ""]))


def asked_tools(fields: Fields) -> Tools | None:
    """The tools that a body brings; None if there are none, or none may be called.

    Raises:
      Refused: tools or a choice of another form.
    """
    tools = fields.each("tools", "a list of functions")
    schemas = dict(map(_tool, tools))
    if len(schemas) < len(tools):
        raise fields.refused("tools", "has two functions of one name")
    many = fields.flag("parallel_tool_calls", True)
    problem = "should be none, auto, required, a function of 'tools', or 'allowed_tools'"
    choice, names = fields.take("tool_choice", (str, dict), problem, "auto"), list(schemas)
    if isinstance(choice, dict):
        choice, names = _chosen(fields.inside("tool_choice"))
        if missing := [name for name in names or [""] if name not in schemas]:
            raise fields.refused("tool_choice", f"names no tool: {missing[0]!r}")
    if choice not in ("none", "auto", "required", "function"):
        raise fields.refused("tool_choice", problem)
    if choice == "required" and not tools:
        raise fields.refused("tool_choice", "needs 'tools'")
    if choice == "none" or not tools:
        return None
    callable_ = {name: schemas[name] for name in names}
    given = [tool.body for tool in tools]
    return Tools(given, callable_, choice != "auto", many and choice != "function")


def _name(tool: Fields) -> tuple[Fields, str]:
    """The function of a tool, and its name.

    Raises:
      Refused: it is none, or has no proper name.
    """
    function = tool.inside("function")
    name = function.text("name")
    if tool.text("type", "function") != "function" or not NAME.fullmatch(name):
        problem = "should be functions, each with a 'name' of letters, digits, _ and -"
        raise Refused(400, f"'tools' {problem}", "tools")
    return function, name


def _tool(tool: Fields) -> tuple[str, Any]:
    """The name of a tool and the schema of its arguments."""
    function, name = _name(tool)
    what = f"a JSON schema (the 'parameters' of {name!r})"
    schema = function.take("parameters", (dict,), what, {}) or NO_ARGUMENTS
    try:
        schema = served_schema(schema)
    except (UserError, TypeError, ValueError, RecursionError) as error:
        raise Refused(400, f"'parameters' of {name!r}: {error}", "tools") from error
    function.text("description"), function.flag("strict")
    function.take("return", (dict,), what, {})  # transformers' `get_json_schema`
    return name, schema


def _chosen(choice: Fields) -> tuple[str, list[str]]:
    """The mode of a `tool_choice` that names tools ("function": this one), and their names."""
    if choice.body.get("type") != "allowed_tools":
        return "function", [_name(choice)[1]]
    choice.text("type")
    allowed = choice.inside("allowed_tools")
    mode = allowed.text("mode", "auto")
    if mode not in ("auto", "required"):
        raise allowed.refused("mode", "should be auto or required")
    return mode, [_name(tool)[1] for tool in allowed.each("tools", "a list of functions")]


@dataclass
class CallReader:
    """Separates calls from text while it grows; arguments are streamed.

    Attributes:
      form: of the calls.
      calls: those so far, in OpenAI's form; at the limit of an answer the last may not be whole. What
        ends before its arguments is dropped, as it is neither a call nor text.
    """

    form: CallForm
    calls: list[dict[str, Any]] = field(default_factory=list)
    _held: str = ""
    _within: str = "text"  # or "name", "arguments", "end" of a call

    def push(
        self, text: str, ended: bool = False, cut: bool = False
    ) -> tuple[str, list[dict[str, Any]]]:
        """What is new: text that is no call, and pieces of calls in OpenAI's form.

        Args:
          cut: it ended at a limit, so that its last characters may begin a call.
        """
        self._held += text
        said, pieces = "", list[dict[str, Any]]()
        begin, end = self.form.begin.rstrip("\n"), self.form.end.strip("\n")
        go_on = True
        while go_on:
            if self._within == "text":
                before, go_on = self._text_before(begin, ended and not cut)
                # What is between two calls is no text.
                said += before if before.strip() or not self.calls else ""
            elif self._within == "name":
                head = HEAD.match(self._held)
                if head and head[2] == self.form.arguments:
                    self._begin(head[1], pieces)
                    self._within, self._held = "arguments", self._held[head.end() :]
                elif self._may_become_head():
                    go_on = False
                elif go_on := ended or bool(end and end in self._held):  # no call
                    found = self._held.partition(end) if end else (self._held, "", "")
                    said += begin + found[0] + found[1]
                    self._within, self._held = "text" if begin else "no call", found[2]
            elif self._within == "arguments":
                go_on = self._arguments(pieces)
            elif self._within == "end":
                if go_on := bool(end and end in self._held):
                    self._within, self._held = "text", self._held.partition(end)[2]
            else:
                said, self._held, go_on = said + self._held, "", False
        return said, pieces

    def _may_become_head(self) -> bool:
        """Whether what is held is a head without its end."""
        text, start = "".join(self._held.split()), '{"name":"'
        name = re.match("[a-zA-Z0-9_-]*", text[len(start) :])
        assert name
        rest = text[len(start) + name.end() :]
        return start.startswith(
            text[: len(start)]
        ) and f'","{self.form.arguments}":'.startswith(rest)

    def _text_before(self, begin: str, ended: bool) -> tuple[str, bool]:
        """Text up to a call, taken from what is held; whether a call begins after it."""
        if not begin:  # a call is the whole text
            if self._held:
                self._within = "name" if self._held.startswith("{") else "no call"
            return "", bool(self._held)
        before, found, rest = self._held.partition(begin)
        if found:
            self._within, self._held = "name", rest
            return before, True
        keep = 0 if ended else _beginning(self._held, begin)
        new = self._held[: len(self._held) - keep]
        if not new.strip() and self.calls:
            return "", False  # perhaps another call comes
        self._held = self._held[len(new) :]
        return new, False

    def _begin(self, name: str, pieces: list[dict[str, Any]]) -> None:
        number = f"call_{secrets.token_hex(12)}"
        pieces.append(
            {
                "index": len(self.calls),
                "id": number,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
        )
        function = {"name": name, "arguments": ""}
        self.calls.append({"id": number, "type": "function", "function": function})

    def _arguments(self, pieces: list[dict[str, Any]]) -> bool:
        """Take arguments from what is held; whether that was their end."""
        function, index = self.calls[-1]["function"], len(self.calls) - 1
        so_far = function["arguments"]
        new = self._held if so_far else self._held.lstrip()
        if "}" in new:
            try:
                _, size = json.JSONDecoder().raw_decode(so_far + new)
                new, self._within = new[: size - len(so_far)], "end"
            except (ValueError, RecursionError):
                pass  # they go on
        self._held = "" if self._within == "arguments" else self._held.lstrip()[len(new) :]
        function["arguments"] += new
        if new and pieces and pieces[-1]["index"] == index:
            pieces[-1]["function"]["arguments"] += new
        elif new:
            pieces.append({"index": index, "function": {"arguments": new}})
        return self._within == "end"


def _beginning(text: str, mark: str) -> int:
    """Length of the longest end of a text that a mark begins with."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
