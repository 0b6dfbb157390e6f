"""OpenAI's Responses API with the official client: its text is a chat's, its events are the client's types."""

import json
from typing import get_args

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseIncludable, ResponseStreamEvent
from served import NAME, port_of
from test_tools import TEMPLATE, TOOLS
from tiny import PRINTABLE

from medusa_jax.serving.http import Limits
from medusa_jax.serving.http.responses import INCLUDED

EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
FUNCTIONS = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
DRAWN = {"model": NAME, "temperature": 0.8, "extra_body": {"seed": 1}}


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=4)
    age: int = pydantic.Field(ge=0, le=30)


@pytest.fixture(scope="module")
def shared_port(tmp_path_factory):
    path = tmp_path_factory.mktemp("responses")
    with port_of(path, TEMPLATE, characters=PRINTABLE, max_position=1024) as port:
        yield port


def said(client, messages, limit=20, **fields):
    """What a chat answers."""
    fields |= DRAWN | {"messages": messages, "max_tokens": limit}
    return client.chat.completions.create(**fields).choices[0].message


def streamed(http, **body):
    """The events of a stream, each of the client's type, and the last one's response."""
    body = {"model": NAME, "temperature": 0.8, "seed": 1, "stream": True} | body
    text = http.post("/v1/responses", json=body).raise_for_status().text
    pairs = [event.split("\n") for event in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events, Response.model_validate(events[-1]["response"])


TEXT = "response.created in_progress output_item.added content_part.added output_text.delta"
TEXT += " output_text.done content_part.done output_item.done incomplete"
CALL = "response.created in_progress output_item.added function_call_arguments.delta"
CALL += " function_call_arguments.done output_item.done completed"


def kinds(events):
    names = dict.fromkeys(event["type"].removeprefix("response.") for event in events)
    return " ".join(names)


def test_text(client, http):
    """Whole and streamed, from text or from items."""
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "On")]
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = said(client, messages).content
    part = {"type": "input_text", "text": "Hi"}
    items = [
        {"role": "user", "content": [part]},
        messages[2],
        {"type": "message", **messages[3]},
    ]
    own = {"input": items, "instructions": "Be kind.", "max_output_tokens": 20}
    whole = client.responses.create(**DRAWN, **own, store=True)
    assert whole.output_text == expected and len(whole.output) == 1
    assert (whole.status, whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert whole.usage.output_tokens == 20 and whole.medusa["steps"] > 0
    Response.model_validate(whole.model_dump())
    events, last = streamed(http, **own)
    assert (
        last.output_text == expected and last.usage.total_tokens == whole.usage.total_tokens
    )
    assert "response." + kinds(events) == TEXT
    pieces = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert "".join(pieces) == expected and len(pieces) > 1
    items += [*whole.output, {"role": "user", "content": ""}]
    more = client.responses.create(**DRAWN, **own)
    assert more.usage.input_tokens > whole.usage.input_tokens + 20
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = client.responses.create(**DRAWN, **own, **asked).output
    assert (
        len(item.content[0].logprobs) == 20
        and len(item.content[0].logprobs[0].top_logprobs) == 2
    )


@pytest.mark.wide
def test_the_clients_own_stream_and_parse(client):
    with client.responses.stream(**DRAWN, input="A pet.", text_format=Pet) as stream:
        deltas = [
            event.delta for event in stream if event.type == "response.output_text.delta"
        ]
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Pet) and "".join(deltas) == final.output_text
    parsed = client.responses.parse(**DRAWN, input="A pet.", text_format=Pet)
    assert parsed.output_parsed == final.output_parsed
    form = {"type": "json_object"}
    answer = client.responses.create(
        **DRAWN, input="A pet.", text={"format": form}, max_output_tokens=99
    )
    assert answer.output_text.startswith("{")


@pytest.mark.wide
def test_tools(client, http):
    """A call, and the tool's answer: as a chat has them."""
    own = {"input": "Is it cold?", "tools": FUNCTIONS}
    named = {"type": "function", "name": "now"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in (named, allowed):
        answer = client.responses.create(**DRAWN, **own, tool_choice=choice)
        assert answer.output[0].name == "now" and answer.status == "completed"
    answer = client.responses.create(
        **DRAWN, **own, tool_choice="required", parallel_tool_calls=False
    )
    [call] = answer.output
    question = {"role": "user", "content": "Is it cold?"}
    chat = said(
        client,
        [question],
        None,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [theirs] = chat.tool_calls
    assert (call.name, call.arguments) == (theirs.function.name, theirs.function.arguments)
    events, last = streamed(http, **own, tool_choice="required", parallel_tool_calls=False)
    assert "response." + kinds(events) == CALL
    assert (last.output[0].arguments, last.output[0].name) == (call.arguments, call.name)
    outcome = {"type": "function_call_output", "call_id": call.call_id, "output": "yes"}
    items, limit = [question, *answer.output, outcome], {"max_output_tokens": 9}
    after = client.responses.create(
        **DRAWN | own | {"input": items}, **limit, tool_choice="none"
    )
    turns = [question, chat.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": theirs.id, "content": "yes"})
    assert (
        after.output_text == said(client, turns, 9, tools=TOOLS, tool_choice="none").content
    )


def test_an_error_in_a_stream(port, other):
    """As the client's type has it."""
    body = {"model": NAME, "input": "x", "stream": True}
    with port.held():
        answer = other("POST", "/v1/responses", limits=Limits(seconds=0.4), json=body)
    _, _, last = answer.text.rpartition("event: error\ndata: ")
    event = EVENT.validate_json(last)
    assert (event.type, event.code, event.sequence_number) == ("error", "timeout", 2)


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"previous_response_id": "resp_1"}, "'previous_response_id' needs stored answers"),
        ({"conversation": {"id": "1"}}, "send the earlier turns in 'input'"),
        ({"background": True}, "'background' is not supported"),
        ({"reasoning": {"effort": "high"}}, "'reasoning' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "which the client runs, not 'web_search'"),
        ({"tool_choice": {"type": "mcp"}}, "'tool_choice' should be of type function or allowed_tools, not 'mcp'"),
        ({"tool_choice": {"type": "function", "name": "?"}}, "'tool_choice' should be a function with a 'name'"),
        ({"tools": [FUNCTIONS[0] | {"colour": 1}]}, "unknown field 'colour' in 'tools[0]'"),
        ({"tool_choice": {"type": "allowed_tools", "tools": ["x"]}}, "'tool_choice' should be functions"),
        ({"tools": [{"type": "function"}]}, "'tools[0]' should be a function with a 'name'"),
        ({"messages": []}, "unknown field 'messages' in a response; did you mean 'input'"),
        ({"max_tokens": 5}, "did you mean 'max_output_tokens'"),
        ({"n": 2}, "unknown field 'n' in a response"),
        ({"input": None, "instructions": "x"}, "'input' is missing"),
        ({"input": []}, "'input' should be a list of turns"),
        ({"input": 5}, "'input' should be text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "'colour' in 'input[0]'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "'role' in 'input' is unknown: 'robot'"),
        ({"text": {"format": {"type": "xml"}}}, "'text.format' should be of type text, json_object, or json_schema with a 'schema'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "'schema' in 'text.format' is missing"),
        ({"text": {"format": {"type": "text", "colour": 1}}}, "unknown field 'colour' in 'text.format'"),
        ({"text": {"verbosity": "low"}}, "'text.verbosity' is not supported"),
        ({"text": {"colour": 1}}, "'colour' in 'text'"),
        ({"top_logprobs": 2}, "'include': ['message.output_text.logprobs']"),
        ({"include": ["message.output_text.logprob"]}, "did you mean 'message.output_text.logprobs'"),
        ({"include": [3]}, "'include' has an unknown name: '3'"),
        ({"metadata": 3}, "'metadata' should be an object"),
        ({"max_output_tokens": 0}, "'max_output_tokens' should be"),
    ],
)  # fmt: skip
def test_what_is_refused(client, http, fields, about):
    answer = http.post("/v1/responses", json={"model": NAME, "input": "x"} | fields)
    assert answer.status_code == 400 and about in answer.json()["error"]["message"], (
        answer.text
    )
    with pytest.raises(openai.NotFoundError, match="none are stored"):
        client.responses.retrieve("resp_1")
    for ask in (client.responses.input_tokens.count, client.responses.compact):
        with pytest.raises(openai.NotFoundError, match="Not Found"):
            ask(model=NAME, input="x")


def test_names_to_include_are_those_of_the_client():
    assert {*INCLUDED} == {*get_args(ResponseIncludable)}
