"""OpenAI's Responses API: a body is read as a chat's, and the answer written as items and events."""

import dataclasses
import re
import secrets
import time
from typing import Any

from medusa_jax.errors import did_you_mean
from medusa_jax.serving.http.calls import Call, chat_call
from medusa_jax.serving.http.fields import BodyFields, HttpError, Values
from medusa_jax.serving.http.messages import content_of
from medusa_jax.serving.http.replies import Reply, Vocabulary
from medusa_jax.serving.request import Delta
from medusa_jax.whole_files import Json

# Fields that a chat lacks or has in another form, and a chat's that are none of a response's.
OWN = {"include", "input", "instructions", "max_output_tokens", "max_tool_calls"}
OWN |= {"text", "tool_choice", "tools"}
FOREIGN = {"messages", "max_tokens", "max_completion_tokens", "n", "response_format"}
FOREIGN |= {"logprobs", "n_cmpl", "n_predict"}
NEUTRAL: Values = {
    "background": (False,),
    "reasoning": ({}, {"effort": None}),
    "truncation": ("disabled",),
}
STATE = {"previous_response_id", "conversation", "prompt"}
STORED = "needs stored answers, and none are stored here: send the earlier turns in 'input'"
# Fields that a response repeats, with their defaults.
REPEATED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}
# Patterns of a chat's names in messages of errors, and a response's.
RENAMED = {
    "^messages.*": "input",
    "^response_format": "text.format",
    "^verbosity$": "text.verbosity",
    "^max_tokens$": "max_output_tokens",
    "^json_schema$": "schema",
    r"\.(function|allowed_tools|json_schema)\b": "",
}
SYSTEM = ("system", "developer")
# Names of `include`; the others are of tools that run at OpenAI, of pictures and of hidden thoughts.
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)


def responses_call(body: Any, *settings: Any) -> Call:
    """Read a body of `/v1/responses`.

    Args:
      settings: the other arguments of `chat_call`.

    Raises:
      HttpError: as for `chat_call`.
    """
    body = BodyFields(body, {}).body
    given = {name: one for name, one in body.items() if one is not None}
    for name in FOREIGN & given.keys():
        hint = did_you_mean(name, OWN, {"messages": "input", "response_format": "text"})
        raise HttpError(400, f"unknown field {name!r} in a response{hint}", name)
    for name in STATE & given.keys():
        raise HttpError(400, f"{name!r} {STORED}", name)
    names = OWN | NEUTRAL.keys()
    fields = BodyFields({n: given[n] for n in names & given.keys()}, NEUTRAL)
    tools = fields.take("tools", (list,), "a list of functions", [])
    choice = fields.take("tool_choice", (str, dict), "a choice", "auto")
    limit = fields.whole("max_output_tokens", None, 1)
    fields.whole("max_tool_calls", None, 0)  # of tools that run at OpenAI
    text = fields.inside("text")
    form = text.take("format", (dict,), "an object", {"type": "text"})
    included = fields.take("include", (list,), "a list of names", [])
    if unknown := [one for one in included if one not in INCLUDED]:
        hint = did_you_mean(unknown[0], INCLUDED)
        raise fields.refused(
            "include", f"has an unknown name: {str(unknown[0])[:40]!r}{hint}"
        )
    chat = {name: one for name, one in given.items() if name not in names} | {
        "messages": _turns(fields),
        "max_tokens": limit,
        "tools": [_function(tool) for tool in tools],
        "tool_choice": _choice(choice),
        "response_format": _nested(form, "json_schema"),
        "verbosity": text.text("verbosity", None),
        "logprobs": LOGPROBS in included,
    }
    fields.finish()
    if chat.get("top_logprobs") and not chat["logprobs"]:
        problem = f"'top_logprobs' needs 'include': [{LOGPROBS!r}]"
        raise HttpError(400, problem, "top_logprobs")
    try:
        call = chat_call(chat, *settings)
    except HttpError as error:
        message = re.sub("'([^']*)'", lambda name: f"'{_renamed(name[1])}'", str(error))
        param = error.param and _renamed(error.param)
        raise HttpError(error.status, message, param, error.code) from error
    repeated = {name: given.get(name, default) for name, default in REPEATED.items()}
    return dataclasses.replace(call, own=repeated)


def _renamed(name: str) -> str:
    """Return a response's name of a field of a chat."""
    for pattern, own in RENAMED.items():
        name = re.sub(pattern, own, name)
    return name


def _turns(fields: BodyFields) -> list[Json]:
    """Return a chat's messages. Instructions that follow each other, and the calls of a turn, are joined."""
    given = fields.take("input", (str, list), "text or a list of items", None)
    if given is None:
        raise fields.refused("input", "is missing")
    instructions, turns = fields.text("instructions"), list[Json]()
    if instructions:
        turns.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*turns, {"role": "user", "content": given}]
    for item in fields.each("input", ""):
        kind = item.text("type", "message")
        for name in ("id", "status", "phase"):  # of an answer that comes back
            item.text(name)
        last = turns[-1] if turns else {"role": ""}
        if kind == "message":
            role, content = item.text("role"), content_of(item)
            if role in SYSTEM and last["role"] in SYSTEM:
                last["content"] += f"\n\n{content}"
            else:
                turns.append({"role": role, "content": content})
        elif kind == "function_call":
            function = {"name": item.text("name"), "arguments": item.text("arguments")}
            call = {"id": item.text("call_id"), "type": "function", "function": function}
            if last["role"] != "assistant":
                turns.append({"role": "assistant"})
            turns[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id, output = item.text("call_id"), content_of(item, "output")
            turns.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            problem = "should be message, function_call or function_call_output"
            raise item.refused("type", f"{problem}, not {kind!r}")
    return turns


def _function(tool: Any, name: str = "tools") -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if kind != "function":
        problem = f"should be functions, which the client runs, not {str(kind)[:40]!r}"
        raise HttpError(400, f"{name!r} {problem}", name)
    return _nested(tool, "function")


def _nested(value: Json, kind: str) -> Json:
    """Return a chat's form of a tool or a format of this type: an inner object has what is next to the type."""
    if value.get("type") != kind:
        return value
    inner = {n: one for n, one in value.items() if n != "type" and one is not None}
    return {"type": kind, kind: inner}


def _choice(choice: str | Json) -> str | Json:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        return _nested(choice, "function")
    if choice.get("type") != "allowed_tools":
        problem = (
            f"should be of type function or allowed_tools, not {choice.get('type')!r:.40}"
        )
        raise HttpError(400, f"'tool_choice' {problem}", "tool_choice")
    if isinstance(choice.get("tools"), list):
        choice = {
            **choice,
            "tools": [_function(tool, "tool_choice") for tool in choice["tools"]],
        }
    return _nested(choice, "allowed_tools")


class ResponsesReply(Reply):
    """Builds the answer to one call of `/v1/responses`: items, and the events of a stream."""

    def __init__(self, call: Call, vocabulary: Vocabulary, model: str) -> None:
        super().__init__(call, vocabulary, model)
        self._items: list[Json] = []
        self._open_kind = ""  # the type of the last item, if it may still grow
        self._entries: list[Json] = []  # log-probabilities of tokens whose text is to come
        self._n_events = 0
        self._response: Json = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "store": False,
            "usage": None,
            **call.own,
        }

    def whole(self) -> Json:
        ending = self.endings[0]
        result = ending.result
        logprobs = result.logprobs or [], result.top_logprobs or []
        self.piece(0, Delta([(result.text, 0)], result.token_ids, *logprobs, ending))
        return self._finished()

    def first(self) -> list[Json]:
        return [
            self._say(kind, response=self._response) for kind in ("created", "in_progress")
        ]

    def last(self) -> list[Json | str]:
        response = self._finished()
        return [self._say(response["status"], response=response)]

    def piece(self, index: int, delta: Delta) -> list[Json]:
        content, events = self._delta(index, delta), list[Json]()
        self._entries += (self._logprobs(index, delta) or {"content": []})["content"]
        is_open = self._open_kind == "message"
        is_empty = not (content or self._items) or (is_open and self._entries)
        if (text := content.get("content", "")) or (delta.ending and is_empty):
            if not is_open:
                events += self._open("message")
            entries, self._entries = self._entries, []
            [part] = self._items[-1]["content"]
            part["text"] += text
            part["logprobs"] += entries
            more = {"content_index": 0, "delta": text, "logprobs": entries}
            events.append(self._say("output_text.delta", **more))
        for call in content.get("tool_calls", ()):
            events += self._open("function_call", call)
            arguments = self._items[-1]["arguments"] = call["function"]["arguments"]
            events.append(self._say("function_call_arguments.delta", delta=arguments))
        if delta.ending:
            self.endings[index] = delta.ending
            events += self._close(self._status())
        return events

    def error(self, error: HttpError) -> Json:
        event = {"type": "error", "sequence_number": self._n_events}
        return error.body()["error"] | event

    def _status(self) -> str:
        is_cut = self._finish_reason(0, self.endings[0]) == "length"
        return "incomplete" if is_cut else "completed"

    def _open(self, kind: str, call: Json | None = None) -> list[Json]:
        """End the last item, and begin one: a message, or this call."""
        events, self._open_kind = self._close("completed"), kind
        number, part = secrets.token_hex(16), {"type": "output_text", "annotations": []}
        item: Json = {"id": f"msg_{number}", "role": "assistant", "content": []}
        if call:
            name = call["function"]["name"]
            item = {
                "id": f"fc_{number}",
                "call_id": call["id"],
                "name": name,
                "arguments": "",
            }
        self._items.append({"type": kind, "status": "in_progress", **item})
        events.append(self._say("output_item.added", item={**self._items[-1]}))
        if not call:
            self._items[-1]["content"] = [part | {"text": "", "logprobs": []}]
            empty = part | {"text": "", "logprobs": []}
            added = self._say("content_part.added", content_index=0, part=empty)
            events.append(added)
        return events

    def _close(self, status: str) -> list[Json]:
        """End the last item, if it may still grow."""
        kind, self._open_kind = self._open_kind, ""
        if not kind:
            return []
        item = self._items[-1]
        item["status"] = status
        if kind == "message":
            [part] = item["content"]
            texts = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [
                self._say("output_text.done", content_index=0, **texts),
                self._say("content_part.done", content_index=0, part=part),
            ]
        else:
            whole = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._say("function_call_arguments.done", **whole)]
        return [*events, self._say("output_item.done", item=item)]

    def _say(self, kind: str, /, **fields: Any) -> Json:
        """Return an event, of the last item unless it is the whole response's."""
        number, self._n_events = self._n_events, self._n_events + 1
        if "response" not in fields:
            fields |= {
                "output_index": len(self._items) - 1,
                "item_id": self._items[-1]["id"],
            }
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _finished(self) -> Json:
        """Return the response after its end."""
        usage, status = self.usage(), self._status()
        is_cut = status == "incomplete"
        cached = {"cache_write_tokens": 0, **usage["prompt_tokens_details"]}
        return self._response | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": cached,
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "medusa": self._stats(self.endings[0]),
            **self.metrics(),
        }
