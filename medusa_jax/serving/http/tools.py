"""`tools` and `tool_choice` of a call, and the tool calls in a text."""

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from medusa_jax.constraints import Constraint
from medusa_jax.constraints.grammars import BLANKS
from medusa_jax.constraints.schemas import served_schema
from medusa_jax.errors import UserError
from medusa_jax.serving.http.fields import BodyFields, HttpError
from medusa_jax.text.tool_chat import CallForm
from medusa_jax.whole_files import Json

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# The beginning of a call, up to its arguments.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"(\w+)"\s*:\s*')
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Mark(NamedTuple):
    """The marks around a call."""

    begin: str
    end: str


FENCE, BARE = Mark("```json", "```"), Mark("", "")


@dataclass(frozen=True)
class Tools:
    """The tools of a call.

    Attributes:
      given: as the client sent them, for the template.
      callable: by name, the schemas of the arguments of tools that may be called.
      must: whether a call is required.
      many: whether several calls are allowed.
    """

    given: list[Json]
    callable: dict[str, Any]
    must: bool
    many: bool

    def constraint(self, form: CallForm) -> Constraint:
        """Return a grammar of calls that their schemas allow, and of free text unless one is required."""
        names = [f"tool_{i}" for i in range(len(self.callable))]
        rules = [f"call: {json.dumps(form.begin)} tool {json.dumps(form.end)}"]
        if not form.begin:
            rules = ["call: tool"]
        repeats = self.many and form.between is not None
        if self.must:
            more_calls = f" ({json.dumps(form.between)} call)*" if repeats else ""
            start = f"start: call{more_calls}"
        elif form.begin:
            mark = form.begin.rstrip("\n")
            opening = form.begin[len(mark) :]
            rules = [
                f"lead[lazy]: FREE {json.dumps(mark)}",
                f"call: lead {json.dumps(opening)} tool {json.dumps(form.end)}",
                r"FREE: /(.|\n)*/",
            ]
            start = "start: call* FREE" if repeats else "start: FREE | call"
        else:
            rules.append(r"FREE: /([^{ \n](.|\n)*)?/")
            start = "start: FREE | call"
        rules.append("tool: " + " | ".join(names))
        for name, (function, schema) in zip(names, self.callable.items()):
            prefix = f'{{"name": "{function}", "{form.arguments}": '
            rules.append(f'{name}: {json.dumps(prefix)} args_{name} "}}"')
            bounded = {**schema, "x-guidance": {"whitespace_pattern": BLANKS}}
            rules.append(f"args_{name}: %json {json.dumps(bounded)}")
        return Constraint("tools", "\n".join([start, *rules, ""]))


def asked_tools(fields: BodyFields) -> Tools | None:
    """Read the tools of a body; None if none may be called.

    Raises:
      HttpError: tools or a choice of another form.
    """
    tools = fields.each("tools", "a list of functions")
    schemas = dict(map(_tool, tools))
    if len(schemas) < len(tools):
        raise fields.refused("tools", "has two functions of one name")
    parallel = fields.flag("parallel_tool_calls", True)
    problem = "should be none, auto, required, a function of 'tools', or 'allowed_tools'"
    choice, names = fields.take("tool_choice", (str, dict), problem, "auto"), list(schemas)
    if isinstance(choice, dict):
        choice, names = _chosen(fields.inside("tool_choice"))
        if unknown := [name for name in names or [""] if name not in schemas]:
            raise fields.refused("tool_choice", f"names no tool: {unknown[0]!r}")
    if choice not in ("none", "auto", "required", "function"):
        raise fields.refused("tool_choice", problem)
    if choice == "required" and not tools:
        raise fields.refused("tool_choice", "needs 'tools'")
    if choice == "none" or not tools:
        return None
    callable_ = {name: schemas[name] for name in names}
    bodies = [tool.body for tool in tools]
    return Tools(bodies, callable_, choice != "auto", parallel and choice != "function")


def _name(tool: BodyFields) -> tuple[BodyFields, str]:
    """Return the function of a tool, and its name.

    Raises:
      HttpError: not a function, or no proper name.
    """
    function = tool.inside("function")
    name = function.text("name")
    if tool.text("type", "function") != "function" or not NAME.fullmatch(name):
        problem = "should be a function with a 'name' of letters, digits, _ and -"
        raise HttpError(400, f"{tool.path!r} {problem}", tool.path)
    return function, name


def _tool(tool: BodyFields) -> tuple[str, Any]:
    """Return the name of a tool and the schema of its arguments."""
    function, name = _name(tool)
    subject = f"a JSON schema (the 'parameters' of {name!r})"
    schema = function.take("parameters", (dict,), subject, {}) or NO_ARGUMENTS
    try:
        schema = served_schema(schema)
    except (UserError, TypeError, ValueError, RecursionError) as error:
        raise HttpError(400, f"'parameters' of {name!r}: {error}", "tools") from error
    function.text("description")
    function.flag("strict")
    function.take("return", (dict,), subject, {})  # transformers' `get_json_schema`
    return name, schema


def _chosen(choice: BodyFields) -> tuple[str, list[str]]:
    """Return the mode of a `tool_choice` that names tools ("function": this one), and their names."""
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
    """Separates tool calls from a text that grows.

    Under `tool_choice: auto` some models, such as Qwen2.5-Coder, write calls without the marks of their template: as
    the first JSON of the text, or in a fence. These are calls if they name a tool of the request.

    Attributes:
      form: of the calls.
      names: of the tools.
      calls: the calls so far, in OpenAI's form. If the limit or a stop string cuts the answer, its last call may have
        incomplete arguments; a call without any is dropped.
      half: whether the last call's arguments are cut.
    """

    form: CallForm
    names: Sequence[str] = ()
    calls: list[Json] = field(default_factory=list)
    half: bool = False
    _held: str = ""
    _mark: Mark | None = None  # of the call that may have begun
    _blanks: str = ""  # before it, since the last call: text unless it is a call
    _fresh: bool = True  # only blanks have come since the start, or since the last call

    def __post_init__(self) -> None:
        self._own = Mark(self.form.begin.rstrip("\n"), self.form.end.strip("\n"))
        self._marks = [mark for mark in (self._own, FENCE) if mark.begin]

    def push(
        self, text: str, ended: bool = False, cut: bool = False
    ) -> tuple[str, list[Json]]:
        """Return the new text outside calls, and the newly completed calls, for a stream.

        Args:
          cut: the model did not end the answer, so its last characters may begin a call.
        """
        self._held += text
        plain, n_calls = "", len(self.calls)
        piece: str | None = ""
        while piece is not None:
            piece = self._call(ended, cut) if self._mark else self._text(ended, cut)
            plain += piece or ""
        calls = enumerate(self.calls[n_calls:], n_calls)
        return plain, [{"index": index, **call} for index, call in calls]

    def _text(self, ended: bool, cut: bool) -> str | None:
        """Take the text before the next mark; None if more has to come first."""
        start = self._held.lstrip()
        if self._fresh and start.startswith("{"):
            self._mark = BARE
            return ""
        if self._fresh and not start and (not ended or self.calls):
            return None  # perhaps a call comes
        places = [(self._held.find(mark.begin), mark) for mark in self._marks]
        at, mark = min(
            ((n, m) for n, m in places if n >= 0), default=(len(self._held), None)
        )
        if mark:
            plain, self._mark = self._held[:at], mark
            self._held = self._held[at + len(mark.begin) :]
        else:
            marks = self._marks
            if ended:
                marks = [self._own] if cut else []
            length = max((_shared_end(self._held, m.begin) for m in marks), default=0)
            plain = self._held[: len(self._held) - length]
            self._held = self._held[len(plain) :]
        if self._fresh and self.calls and not plain.strip():
            if not mark:
                self._held = plain + self._held
                return None
            self._blanks = plain
            return ""
        self._fresh = self._fresh and not plain.strip()
        return plain if mark or plain else None

    def _call(self, ended: bool, cut: bool) -> str | None:
        """Take a call, or text that only looked like one; None if more has to come first."""
        assert self._mark
        begin, end = self._mark
        is_own, head = self._mark == self._own, HEAD.match(self._held)
        closed = bool(end) and end in self._held
        if (
            head
            and head[2] in (self.form.arguments, "arguments")
            and (is_own or head[1] in self.names)
        ):
            arguments, tail, closed, whole = self._held[head.end() :], "", False, False
            with suppress(ValueError, RecursionError):
                value, size = json.JSONDecoder().raw_decode(arguments)
                arguments, tail = arguments[:size], arguments[size:]
                closed = (end or "}") in tail
                whole = closed or isinstance(value, dict)
            if not (closed or ended):
                return None
            self.half, self._blanks = not whole, ""
            function = {"name": head[1], "arguments": arguments}
            number = f"call_{secrets.token_hex(12)}"
            self.calls.append({"id": number, "type": "function", "function": function})
            self._held, self._mark, self._fresh = tail.partition(end or "}")[2], None, True
            return ""
        if not head and self._may_become_head(is_own) and (is_own or cut or not ended):
            return None
        if is_own and end and not (closed or ended):
            return None
        raw, self._blanks = self._blanks + begin, ""
        if is_own and end:
            text, mark, self._held = self._held.partition(end)
            raw += text + mark
        self._mark, self._fresh = None, False
        return raw

    def _may_become_head(self, is_own: bool) -> bool:
        """Whether the held text is the beginning of a head; without the template's marks, of a tool's."""
        text, start = "".join(self._held.split()), '{"name":"'
        name = re.match("[a-zA-Z0-9_-]*", text[len(start) :])
        assert name
        tail = text[len(start) + name.end() :]
        if tail:
            is_known = name[0] in self.names
        else:
            is_known = any(one.startswith(name[0]) for one in self.names)
        keys = [f'","{key}":' for key in {self.form.arguments, "arguments"}]
        return (
            start.startswith(text[: len(start)])
            and any(key.startswith(tail) for key in keys)
            and (is_own or is_known)
        )


def _shared_end(text: str, mark: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
