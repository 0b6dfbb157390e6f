"""What is sent to the port: bodies, paths, keys, host names, refused fields; its log and its metrics."""

import asyncio
import json
import re
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import ASKED, NAME, counted

from medusa_jax.serving.http import Limits
from medusa_jax.serving.http.replies import Reply


@pytest.mark.parametrize(
    ("content", "kind", "status", "about"),
    [
        (b"{", "application/json", 400, "not JSON"),
        (b"[]", "application/json", 400, "object"),
        (b'{"prompt": NaN}', "application/json", 400, "NaN"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, "the body has an unpaired"),
        (b"[" * 100_000, "application/json", 400, "not JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400, "not JSON"),
        (b'{"seed": ' + b"9" * 400 + b"}", "application/json", 400, "too large"),
        (b'{"top_p": 1e400}', "application/json", 400, "too large"),
        (b'{"a": ' + b"[" * 700 + b"]" * 700 + b"}", "application/json", 400, "nested"),
        (b"\xff\xfe", "application/json", 400, "not JSON"),
        (b"{}", "text/plain", 415, "application/json"),
        (b" " * (1 << 20) + b"{}", "application/json", 413, "larger"),
        (b'{"prompt": "a", "max_tokens": 1}', "application/json; charset=utf-8", 200, ""),
        (b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}', "application/json", 200, ""),
    ],
)
def test_bodies(http, content, kind, status, about):
    answer = http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == status
    if status != 200:
        assert about in answer.json()["error"]["message"]


def test_limits_of_a_body(other):
    """One of just the limit is read, one byte more is not, with its length announced or not; nor one that
    takes too long."""

    def ask(content):
        limits = Limits(body_bytes=20, read_seconds=0.05)
        sent = {"content": content, "headers": {"content-type": "application/json"}}
        return other("POST", "/v1/completions", limits=limits, **sent).status_code

    async def in_parts(content):
        yield content[:7]
        yield content[7:]

    for sent_as in (bytes, in_parts):
        assert [ask(sent_as(b"[" * n)) for n in (20, 21)] == [400, 413]

    async def never():
        yield b"{"
        await asyncio.sleep(60)

    assert ask(never()) == 408


def test_paths_and_methods(http):
    assert http.get("/nowhere").status_code == 404
    assert counted(http, 'medusa_calls_total{endpoint="other",status="404"}') > 0
    refused = http.get("/v1/completions")
    assert refused.status_code == 405 and "error" in refused.json()
    assert refused.headers["allow"] == "POST"
    assert http.get("/health").json() == {"status": "ok"}
    page = http.get("/")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text  # no outside hosts


def test_garbage_on_the_wire(port, http):
    for noise in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\x00" * 5000 + b"\r\n\r\n"):
        with socket.create_connection(port.address) as link:
            link.sendall(noise)
            link.settimeout(10)
            assert b"400" in link.recv(200)
    assert http.get("/health").status_code == 200


WORDS = st.sampled_from(["in", "the hat", "abc", "", "\u00e9\U0001f40d", "</s>", "d" * 90])
KNOWN = "n stop temperature top_p top_k min_p seed logprobs stream drafts acceptance echo"
KNOWN += " user stream_options logit_bias prompt model max_tokens epsilon nonsense"
KNOWN += " guided_regex structured_outputs presence_penalty repetition_penalty"
FIELDS = st.sampled_from(KNOWN.split())
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.none() | st.booleans() | st.integers(-3, 40) | st.integers() | FLOATS | WORDS
VALUES |= st.lists(st.integers(-1, 50), max_size=3) | st.lists(WORDS, max_size=3)
VALUES |= st.dictionaries(WORDS, WORDS, max_size=2)


def test_any_body_gets_an_answer_or_a_reason(port, http):
    statuses = set()

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.dictionaries(FIELDS, VALUES, max_size=3))
    def check(fields):
        small = {"prompt": "in", "max_tokens": 4, "acceptance": "auto"}
        answer = http.post("/v1/completions", json=small | fields)
        statuses.add(answer.status_code)
        if answer.status_code == 200:
            return
        assert answer.status_code in (400, 404, 429), answer.text
        assert answer.json()["error"]["message"]

    check()
    assert {200, 400} <= statuses


def test_a_key(other):
    for sent in ({}, {"authorization": "Bearer no"}):
        for path in ("/v1/models", "/metrics"):
            assert other("GET", path, key="open sesame", headers=sent).status_code == 401
        refused = other("POST", "/v1/completions", key="k", headers=sent, json={})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health"):
        assert other("GET", path, key="k").status_code == 200
    right = ["Bearer open sesame", "bearer open sesame", "BEARER  open sesame"]  # RFC 9110
    wrong = ["Basic open sesame", "Bearer open sesamé", "Bearer open sesame2", "Bearer", ""]
    for sent in right + wrong:  # byte by byte, as `curl` sends it
        given = {"authorization": sent.encode()}
        answer = other("GET", "/v1/models", key="open sesame", headers=given)
        assert answer.status_code == (200 if sent in right else 401), sent


def test_metrics_count_what_was_done(http):
    """Under vLLM's names where it has one; no metric has a `_created` series."""
    names = [
        'medusa_calls_total{endpoint="completions",status="200"}',
        "vllm:prompt_tokens_total",
        "medusa_reused_tokens_total",
        "vllm:generation_tokens_total",
        'vllm:request_success_total{finished_reason="length"}',
        "medusa_steps_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:request_queue_time_seconds_count",
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
    ]
    before = [counted(http, name) for name in names]
    answer = http.post("/v1/completions", json=ASKED | {"n": 2}).json()
    after = [counted(http, name) for name in names]
    own = [choice["medusa"] for choice in answer["choices"]]
    steps, accepted, reused = (
        sum(one[name] for one in own)
        for name in ("steps", "accepted_drafts", "reused_tokens")
    )
    read = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["total_tokens"] == read + 120
    grown = [new - old for old, new in zip(before, after, strict=True)]
    expected = [1, 2 * read, reused, 120, 2, steps, steps, accepted, accepted, 2, 2, 2, 2]
    assert grown == expected and accepted > 0
    said = http.get("/metrics").text
    assert "_created" not in said
    assert counted(http, "medusa_slots ") == 3
    assert counted(http, "vllm:num_requests_running") == 0


def test_the_log(other, capfd):
    """A line for what is refused, whole or streamed, and for every call only if asked for."""
    for log_all in (False, True):
        for more in ({"n": 0}, {}, {"stream": True}):
            other("POST", "/v1/completions", log_all=log_all, json=ASKED | more)
    said = [line[9:] for line in capfd.readouterr().err.splitlines() if "POST" in line]
    refused = "POST /v1/completions 400: 'n' should be from 1 to 128, not 0, after "
    assert [line.startswith(refused) for line in said] == [True, True, False, False]
    assert all(re.search(r"200: \d+ \+ 60 tokens, the first", line) for line in said[2:])


def test_the_log_of_what_begins_no_call(other, capfd):
    for method, path, status, about, more in [
        ("POST", "/api/generate%1B", 404, "Not Found", {}),
        ("GET", "/v1/completions", 405, "Method Not Allowed", {}),
        ("GET", "/v1/models", 401, "the key is wrong or missing", {"key": "k"}),
        ("GET", "/", 400, "the Host of this request is unknown here: send", {"hosts": "y"}),
    ]:
        answer = other(method, path, **more)
        assert answer.status_code == status and about in answer.json()["error"]["message"]
        [line] = capfd.readouterr().err.splitlines()
        assert line[9:].startswith(f"{method} {path} {status}: {about}")


@pytest.mark.parametrize("stream", [False, True])
def test_what_breaks_is_told_and_counted(port, http, monkeypatch, stream, capfd):
    """Without the reason, which is in the log; also in the middle of a stream."""
    broken = 'medusa_calls_total{endpoint="completions",status="500"}'

    def raising(*asked):
        raise RuntimeError("secret")

    place = (Reply, "piece") if stream else (port.server, "submit_all")
    monkeypatch.setattr(*place, raising)
    before = counted(http, broken)
    asked = ASKED | {"stream": stream}
    closed = {"connection": "close"}  # which it would be without a word
    answer = http.post("/v1/completions", json=asked, headers=closed)
    assert answer.status_code == (200 if stream else 500) and "secret" not in answer.text
    assert json.loads(answer.text.removeprefix("data: "))["error"]["type"] == "server_error"
    assert counted(http, broken) == before + 1
    assert "500: RuntimeError: secret" in capfd.readouterr().err


def test_names_of_the_host(other):
    """A name that another site has resolve to this machine is refused, page and all."""
    hosts = ["Localhost", "127.0.0.1", "::1", "[::1]"]
    ours = "localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"
    for host in ours:
        sent = {"headers": {"host": host}, "hosts": hosts}
        assert other("GET", "/health", **sent).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil", "x@localhost", ""):
        sent = {"headers": {"host": host}, "hosts": hosts}
        for path in ("/", "/health", "/v1/models"):
            assert other("GET", path, **sent).status_code == 400
    assert other("GET", "/health", headers={"host": "a.example"}).status_code == 200


CHAT = {"model": NAME, "messages": [{"role": "user", "content": "in"}], "temperature": 0}
# Fields of a completion, and what the error says; a field with a colon is `param`.
COMPLETIONS = [
    ({"model": "gpt-4"}, f"no model 'gpt-4' here: the model is {NAME!r}"),
    ({"n": 129}, "n:"),
    (
        {"prompt": ["a"] * 50, "n": 3},
        "50 prompts with n = 3 are 150 choices, more than 128",
    ),
    ({"n": 2, "best_of": 3}, "best_of:"),
    ({"max_tokens": 2.5}, "max_tokens:"),
    ({"temperature": 2.5}, "temperature"),
    ({"stop": [""]}, "stop:"),
    ({"prompt": []}, "prompt:"),
    ({"prompt": "the " * 200}, "shorten"),
    ({"prompt": [10**6]}, "vocabulary"),
    ({"stream": "yes"}, "stream:"),
    ({"stream_options": {"every": 1}}, "every:"),
    ({"stream_options": {"continuous_usage_stats": True}}, "'stream_options' is not"),
    ({"max_tokens": -2}, "max_tokens:"),
    ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos:"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids:"),
    ({"skip_special_tokens": False}, "not supported"),
    ({"logit_bias": {"5": 10**309}}, "digits"),
    ({"acceptance": "greedy", "temperature": 1}, "temperature 0"),
    ({"logit_bias": {"5": 101}}, "from -100 to 100"),
    ({"logit_bias": {"1_0": 100}}, "'1_0'"),
    ({"metadata": 3}, "metadata:"),
    ({"samplers": ["top_k", "temp"]}, "'samplers' has an unknown name: 'temp'"),
    ({"samplers": "kz"}, "samplers:"),
    ({"samplers": [["top_k"]]}, "samplers:"),
    ({"logit_bias": {"100000": 1}}, "outside the vocabulary"),
    ({"logit_bias": [[5, 1], [6]]}, "pairs of a token and a number"),
    ({"n_indent": 2**32}, "n_indent:"),
    ({"guided_regex": "(a"}, "invalid regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "one constraint"),
    ({"guided_jsn": {}}, "did you mean 'guided_json'"),
    ({"length_penalti": 2}, "did you mean 'repeat_penalty'"),
    ({"messages": []}, "unknown field 'messages': it is one of /v1/chat/completions"),
    ({"tools": []}, "'tools': it is one of /v1/chat/completions"),
    ({"input_prefix": "a"}, "'input_prefix': it is one of /infill"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "not supported"),
    ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "outputs.choice'"),
    ({"guided_choice": ["", "a"]}, "at least one string, none empty, not ['', 'a']"),
]
# fmt: off
CHATS = [
    ({"top_logprobs": 2}, "top_logprobs:"),
    ({"messages": []}, "messages:"),
    ({"prompt": "x"}, "unknown field 'prompt': it is one of /v1/completions"),
    ({"input": "x"}, "unknown field 'input': it is one of /v1/responses"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"continue_final_message": True}, "needs a last turn of the assistant"),
    *(({"messages": [turn]}, about) for turn, about in [
        ({"role": "user", "content": "x", "colour": 1}, "'colour' in 'messages[0]'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": ["x"]}, "'messages[0].content[0]' should"),
    ]),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {
        "name": "a", "arguments": '{"a": ' + "[" * 700 + "]" * 700 + "}"}}]}]}, "not an object of JSON"),
    ({"response_format": {"type": "xml"}}, "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}},
     "'schema' in 'response_format.json_schema' is missing"),
    ({"response_format": {"type": "json_object", "scheme": {}}}, "did you mean 'schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": 1}}},
     "'strickt' in 'response_format.json_schema'"),
    ({"chat_template_kwargs": {"thinking": 1}}, "no variable 'thinking'"),
    ({"add_special_tokens": True}, "not supported"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "knows no tools"),
]
# fmt: on
# What OpenAI's and vLLM's clients send although it asks for nothing.
NOTHING = dict.fromkeys(["audio", "documents", "prediction", "truncate_prompt_tokens"])
NOTHING |= dict.fromkeys(["ignore_eos", "use_beam_search", "echo"], False)
NOTHING |= {
    "prompt_cache_key": "k", "user": "u", "prompt_cache_retention": "24h", "min_tokens": 0,
    "stop_token_ids": [], "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "top_k": -1, "length_penalty": 1.0, "include_stop_str_in_output": False, "best_of": 1,
    "priority": 0, "structured_outputs": {"disable_fallback": False, "structural_tag": None},
    "stream_options": {"include_usage": False, "continuous_usage_stats": False},
}  # fmt: skip
# What llama.vim and llama.vscode send to a chat.
NOTHING |= {
    "model": "", "id_slot": 3, "cache_prompt": True, "samplers": "edkypmxt", "n_predict": 5, "seed": -1, "lora": [],
    "response_fields": [""], "t_max_prompt_ms": 500, "t_max_predict_ms": 60000, "typical_p": 1, "n_cmpl": 1,
    "dynatemp_range": 0, "xtc_probability": 0, "repeat_last_n": 64, "repeat_penalty": 1, "dry_multiplier": 0,
    "dry_base": 1.75, "dry_penalty_last_n": -1, "max_tokens": -1, "timings_per_token": False,
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
