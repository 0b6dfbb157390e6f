"""Refused calls: the status, the field that the error names, and words of its sentence."""

import pytest
from served import ASKED, NAME

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "in"}], "temperature": 0}
SCHEMA = {"minimum": 3, "maximum": 1, "type": "integer"}
# Fields of a completion, and what the error says; a field with a colon is `param`.
COMPLETIONS = [
    ({"model": "gpt-4"}, "model"),
    ({"n": 17}, "n:"),
    ({"n": 9}, "at most 6 choices here"),  # more than the queue holds
    ({"max_tokens": 2.5}, "max_tokens:"),
    ({"temperature": 2.5}, "temperature"),
    ({"stop": [""]}, "stop:"),
    ({"prompt": []}, "prompt:"),
    ({"prompt": "the " * 200}, "shorten"),
    ({"prompt": [10**6]}, "vocabulary"),
    ({"stream": "yes"}, "stream:"),
    ({"stream_options": {"every": 1}}, "every:"),
    ({"stream_options": {"continuous_usage_stats": True}}, "'stream_options' is not"),
    ({"echo": 0}, "echo:"),
    ({"max_tokens": 0}, "max_tokens:"),
    ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos:"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids:"),
    ({"skip_special_tokens": False}, "not supported"),
    ({"logit_bias": {"5": 10**309}}, "digits"),
    ({"acceptance": "greedy", "temperature": 1}, "temperature 0"),
    ({"logit_bias": {"5": 101}}, "from -100 to 100"),
    ({"logit_bias": {"100000": 1}}, "outside the vocabulary"),
    ({"guided_regex": "(a"}, "invalid regex"),
    ({"guided_regex": "\\p{Han}+"}, "cannot be met"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "one constraint"),
    ({"guided_json": SCHEMA}, "cannot be used"),
    ({"guided_jsn": {}}, "did you mean 'guided_json'"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "not supported"),
]
# fmt: off
CHATS = [
    ({"top_logprobs": 2}, "top_logprobs:"),
    ({"messages": []}, "messages:"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    *(({"messages": [turn]}, about) for turn, about in [
        ({"role": "user", "content": "x", "colour": 1}, "'colour' in 'messages[0]'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": ["x"]}, "'messages[0].content[0]' should"),
    ]),
    ({"response_format": {"type": "xml"}}, "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "no 'schema'"),
    ({"response_format": {"type": "json_object", "scheme": {}}}, "did you mean 'schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": 1}}},
     "'strickt' in 'response_format.json_schema'"),
    ({"chat_template_kwargs": {"thinking": 1}}, "no variable 'thinking'"),
    ({"add_special_tokens": True}, "not supported"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "knows no tools"),
]
# fmt: on
# What OpenAI's and vLLM's clients send although it asks for nothing.
NOTHING = {
    "audio": None,
    "documents": None,
    "prediction": None,
    "prompt_cache_key": "k",
    "user": "u",
    "prompt_cache_retention": "24h",
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "top_k": -1,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "truncate_prompt_tokens": None,
    "include_stop_str_in_output": False,
    "echo": False,
    "best_of": 1,
    "priority": 0,
    "structured_outputs": {"disable_fallback": False, "structural_tag": None},
    "stream_options": {"include_usage": False, "continuous_usage_stats": False},
}  # fmt: skip
OF_CHATS = {
    "chat_template_kwargs": {}, "add_generation_prompt": True, "verbosity": "medium",
    "add_special_tokens": False, "tool_choice": "auto", "tools": None, "reasoning_effort": None,
    "response_format": {"type": "text"}, "functions": [], "function_call": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("start", "path", "fields"),
    [
        (ASKED, "completions", NOTHING | {"add_special_tokens": True, "suffix": ""}),
        (CHAT, "chat/completions", NOTHING | OF_CHATS),
    ],
)
def test_what_asks_for_nothing_changes_nothing(http, start, path, fields):
    plain, same = (
        http.post(f"/v1/{path}", json=start | {"max_tokens": 5} | more).json()["choices"][0]
        for more in ({}, fields)
    )
    names = ("text", "message", "finish_reason")
    assert [same.get(name) for name in names] == [plain.get(name) for name in names]


@pytest.mark.parametrize(
    ("start", "path", "fields", "about"),
    [
        *((ASKED, "completions", *row) for row in COMPLETIONS),
        *((CHAT, "chat/completions", *row) for row in CHATS),
    ],
)
def test_what_is_refused(http, start, path, fields, about):
    answer = http.post(f"/v1/{path}", json=start | {"max_tokens": 2} | fields)
    assert answer.status_code == (404 if "model" in fields else 400)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    assert about in error["message"] or about == f"{error['param']}:", error
