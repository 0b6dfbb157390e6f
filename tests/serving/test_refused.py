"""Refused calls: the status, the field that the error names, and words of its sentence."""

import pytest
from served import ASKED, NAME

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "in"}], "temperature": 0}
SCHEMA = {"minimum": 3, "maximum": 1, "type": "integer"}
# Fields of a completion, and what the error says; a field with a colon is `param`.
COMPLETIONS = [
    ({"model": "gpt-4"}, "model"),
    ({"n": True}, "n:"),
    ({"n": 17}, "n:"),
    ({"n": 9}, "at most 6 choices here"),  # more than the queue holds
    ({"n": 2, "prompt": ["a"] * 9}, "n:"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens:"),
    ({"temperature": "1"}, "temperature:"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"min_p": 1.5}, "min_p:"),
    ({"stop": [""]}, "stop:"),
    ({"stop": ["a"] * 17}, "stop:"),
    ({"stop": ["a", 3]}, "stop:"),
    ({"logprobs": 21}, "logprobs:"),
    ({"prompt": []}, "prompt:"),
    ({"prompt": [["x"]]}, "prompt:"),
    ({"prompt": "the " * 200}, "shorten"),
    ({"prompt": [10**6]}, "vocabulary"),
    ({"stream": "yes"}, "stream:"),
    ({"stream_options": {"every": 1}}, "every:"),
    ({"acceptance": "greedy", "temperature": 1}, "temperature 0"),
    ({"tpo_k": 3}, "tpo_k"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "much"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 200}}, "logit_bias:"),
    ({"logit_bias": {"5": 101}}, "from -100 to 100"),
    ({"logit_bias": {"five": 1}}, "numbers by token id"),
    ({"logit_bias": {"5": True}}, "numbers by token id"),
    ({"logit_bias": {"100000": 1}}, "outside the vocabulary"),
    ({"logit_bias": {"-1": 1}}, "token id"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"guided_regex": "(a"}, "invalid regex"),
    ({"guided_regex": 3}, "guided_regex"),
    ({"guided_regex": "\\p{Han}+"}, "cannot be met"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "one constraint"),
    ({"guided_choice": []}, "choice should be"),
    ({"guided_json": SCHEMA}, "cannot be used"),
    ({"guided_jsn": {}}, "did you mean 'guided_json'"),
    ({"structured_outputs": {"xml": 1}}, "unknown field 'xml'"),
]
CHATS = [
    ({"top_logprobs": 2}, "top_logprobs:"),
    ({"messages": []}, "messages:"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"response_format": {"type": "xml"}}, "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "'json_schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "no 'schema'"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "knows no tools"),
]


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
