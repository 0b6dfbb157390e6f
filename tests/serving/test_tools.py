"""Tool calls with the official client, from a model that knows nothing: the grammar does it all."""

import json

import jsonschema
import openai
import pytest
from served import NAME, port_of
from tiny import PRINTABLE
from transformers import PreTrainedTokenizerFast

from medusa_jax.serving.http.calls import chat_call
from medusa_jax.serving.http.tools import CallReader
from medusa_jax.text.tool_chat import FORMS

pytest.importorskip("llguidance")

# As Qwen's, shortened.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Call as <tool_call>{...}</tool_call>{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/short"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"short": {"type": "string", "maxLength": 5}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
MESSAGES = [{"role": "user", "content": "Is it cold?"}]


@pytest.fixture(scope="module")
def shared_port(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools")
    with port_of(path, TEMPLATE, characters=PRINTABLE, max_position=1024) as port:
        yield port


def ask(client, **fields):
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 120, "tools": TOOLS}
    return client.chat.completions.create(**asked | {"seed": 1, "temperature": 1} | fields)


NAMED = {"type": "function", "function": {"name": "weather"}}


def check_call(function):
    arguments = json.loads(function.arguments)
    if function.name == "weather":
        jsonschema.validate(arguments, WEATHER)
    else:
        assert function.name == "now" and arguments == {}


@pytest.mark.wide
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_are_those_of_the_schemas(client, choice):
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    [whole] = ask(client, **fields).choices
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    [call] = whole.message.tool_calls
    check_call(call.function)
    assert choice == "required" or call.function.name == "weather"
    streamed, reasons = {}, []
    for piece in ask(client, **fields, stream=True):
        [one] = piece.choices
        assert not one.delta.content
        reasons.append(one.finish_reason)
        for part in one.delta.tool_calls or []:
            seen = streamed.setdefault(part.index, ["", ""])
            seen[0] += part.function.name or ""
            seen[1] += part.function.arguments or ""
    assert streamed == {0: [call.function.name, call.function.arguments]}
    assert reasons[-1] == "tool_calls"
    # The answer of the tool goes through the template, too.
    turns = [
        *MESSAGES,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "yes </s>"},
    ]
    after = ask(client, messages=turns, tool_choice="none", max_tokens=3)
    assert after.usage.prompt_tokens > 50 and after.usage.completion_tokens <= 3


def cut_call(arguments):
    """A history with a call of these arguments."""
    call = {"id": "1", **NAMED, "function": {"name": "weather", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    return {"messages": [turn, {"role": "tool", "content": "x"}]}


ALLOWED = {"type": "allowed_tools"}


def tool(**schema):
    return {"tools": [{"function": {"name": "a", "parameters": schema}}]}


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        (
            {"tools": [{"type": "function"}]},
            r"'tools\[0\]' should be a function with a 'name'",
        ),
        ({"tool_choice": {"type": "x"}}, "'tool_choice' should be a function"),
        (tool(maximum=2**70), "'maximum' has a number beyond"),
        ({"tool_choice": {"function": {"name": "zoo"}}}, "names no tool"),
        ({"tools": [], "tool_choice": "required"}, "needs 'tools'"),
        ({"response_format": {"type": "json_object"}}, "not both"),
        (tool(type="x"), "the tools cannot"),
        ({"tools": TOOLS * 2}, "two functions of one name"),
        ({"tool_choice": NAMED | {"name": "now"}}, "'name' in 'tool_choice'"),
        (
            {"tool_choice": ALLOWED | {"allowed_tools": {"mode": "some"}}},
            "auto or required",
        ),
        (cut_call('{"city": "Par'), r"'arguments' in .* of the call of 'weather' .* cut"),
    ],
)
def test_what_is_refused(client, fields, about):
    with pytest.raises(openai.BadRequestError, match=about):
        ask(client, **fields)


CALL = '{"name": "now", "arguments": {"a": ["}}", 1]}}'
OTHER = '<tool_call>\n{"name": "no", "parameters'
TEXTS = [
    ("just text <tool", "just text <tool", 0),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    (f"hm <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "hm ", 2),
    (f"<tool_call>\n{CALL}", "", 1),
    ('<tool_call>\n{"name": "no', "", 0),
    (f"hm <tool_call>\n{CALL}\n</tool_call>\n<tool_call>", "hm ", 1),
    (OTHER, OTHER, 0),
    # Without the template's marks, as Qwen2.5-Coder writes them.
    (CALL, "", 1),
    (f"\n{CALL}\n{CALL}\n", "", 2),
    (f"```json\n{CALL}\n```", "", 1),
    (f"Sure:\n```json\n{CALL}\n```\nDone.", "Sure:\n\nDone.", 1),
    (f"Sure: {CALL}", f"Sure: {CALL}", 0),
    (CALL.replace("now", "later"), CALL.replace("now", "later"), 0),
    ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', 0),
    (' {"name": "no', ' {"name": "no', 0),
    ("```", "```", 0),
    ("<tool_call>\nno\n</tool_call>!", "<tool_call>\nno\n</tool_call>!", 0),
    # Blanks before a text that begins like a mark, or with one of no call.
    (f"<tool_call>\n{CALL}\n</tool_call>\n\n<b>", "\n\n<b>", 1),
    (f"<tool_call>\n{CALL}\n</tool_call>\n\n```json\nx", "\n\n```json\nx", 1),
]
# Of a form that has no marks.
BARE = [
    (CALL.replace("arguments", "parameters"), "", 1),
    ("text", "text", 0),
    ("{x", "{x", 0),
]


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [("<tool_call>", *row) for row in TEXTS] + [('"parameters"', *row) for row in BARE],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_told_from_text_that_grows(form, text, said, calls, size):
    reader = CallReader(FORMS[form], ["now"])
    shown, streamed = "", []
    for at in range(0, len(text) + size, size):
        new, pieces = reader.push(text[at : at + size], ended=at >= len(text))
        shown += new
        streamed += pieces
    assert (shown, len(reader.calls)) == (said, calls)
    for index, call in enumerate(reader.calls):
        assert call["function"] == {"name": "now", "arguments": '{"a": ["}}", 1]}'}
        assert streamed[index] == {"index": index, **call}


MARKS = [(form, form.begin) for form in FORMS.values()]
MARKS += [(MARKS[0][0], ""), (MARKS[0][0], "```json\n")]


@pytest.mark.parametrize("before", ["", "hm ", f"{CALL}\n"])
@pytest.mark.parametrize(("form", "begin"), MARKS)
def test_a_call_that_is_cut_is_no_text(form, begin, before):
    """At any character, after text or a whole call; what cannot become a call is text."""
    if not begin and before == "hm ":
        return
    n_calls, head = (
        before != "hm " and bool(before),
        f'{{"name": "now", "{form.arguments}": ',
    )
    for size in range(1, len(head) + 3):
        for cuts in ([size], range(size)):  # whole, and letter by letter
            reader, said, at = CallReader(form, ["now"]), "", 0
            for end in (*cuts, size):
                text = (before + begin + head + '{"')[: len(before + begin) + end]
                said += reader.push(text[at:], ended=end == size, cut=end == size)[0]
                at = len(text)
            is_half = size >= len(head) - 1
            assert said == ("" if n_calls else before)
            assert (len(reader.calls) - n_calls, reader.half) == (is_half, is_half)
    others = ["{x", '{"name": "now", "a": 1']
    for text in others if begin == form.begin else [*others, '{"name": "nowhere']:
        text = before + begin + text
        assert "{" in CallReader(form, ["now"]).push(text, ended=True, cut=True)[0]


@pytest.mark.parametrize("stop", ['"weather', '"city"', "</tool_call>"])
def test_a_stop_string_within_a_call(client, stop):
    """Half arguments are no call to be made; whole ones are, without the closing mark, too."""
    for stream in (False, True):
        answer = ask(client, tool_choice=NAMED, stop=[stop], stream=stream)
        choices = [piece.choices[0] for piece in answer] if stream else answer.choices
        parts = [one.delta if stream else one.message for one in choices]
        calls = [call for part in parts for call in part.tool_calls or ()]
        assert not any(part.content for part in parts)
        reason = "tool_calls" if stop == "</tool_call>" else "stop"
        assert choices[-1].finish_reason == reason
        assert len(calls) == (stop != '"weather')
        if calls and reason == "stop":
            assert calls[0].function.arguments.strip() == "{"


@pytest.mark.parametrize("limit", [*range(1, 11), 25, 36])
def test_an_answer_that_ends_in_the_head_of_a_call(client, limit):
    fields = {"tool_choice": NAMED, "max_tokens": limit}
    [whole] = ask(client, **fields).choices
    assert (whole.message.content, whole.message.tool_calls) == ("", None)
    assert whole.finish_reason == "length"
    for piece in ask(client, **fields, stream=True):
        delta = piece.choices[0].delta
        assert not delta.content and not delta.tool_calls
    turns = [*MESSAGES, whole.message.model_dump(), *MESSAGES]
    assert ask(client, messages=turns, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("arguments", [{}, {"arguments": ""}, {"arguments": " \n"},
                                       {"arguments": None}, {"arguments": "{}"}])  # fmt: skip
def test_a_history_with_empty_arguments(port, arguments):
    """As transformers renders the call with `{}`."""
    call = {"type": "function", "function": {"name": "now", **arguments}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": "1", **call}]},
        {"role": "tool", "tool_call_id": "1", "content": "yes"},
    ]
    asked = chat_call({"messages": turns}, NAME, port.model, "", 5, len)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=port.model.tokenizer.backend,
        bos_token="<s>",
        chat_template=TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] or '' }}"),
    )
    call["function"]["arguments"] = {}
    turns[1]["tool_calls"] = [call]
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert list(asked.requests[0].prompt) == expected


def test_allowed_tools(client):
    """OpenAI's way to leave some of them out."""
    tools = [{"type": "function", "function": {"name": "now"}}]
    choice = ALLOWED | {"allowed_tools": {"mode": "required", "tools": tools}}
    for seed in range(4):
        [whole] = ask(client, tool_choice=choice, seed=seed).choices
        assert {call.function.name for call in whole.message.tool_calls} == {"now"}
