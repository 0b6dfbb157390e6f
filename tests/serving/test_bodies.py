"""What is sent to the port: bodies of all kinds and sizes, paths, noise."""

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import NAME, ask_app

from medusa_jax.serving.http import Limits, make_app


@pytest.mark.parametrize(
    ("content", "kind", "status", "about"),
    [
        (b"{", "application/json", 400, "not JSON"),
        (b"[]", "application/json", 400, "object"),
        (b'{"prompt": NaN}', "application/json", 400, "NaN"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, "surrogate"),
        (b"[" * 100_000, "application/json", 400, "not JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400, "not JSON"),
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


def test_a_body_of_just_the_limit(other):
    """It is read, one byte more is not, with its length announced or not."""
    kind, limits = {"content-type": "application/json"}, Limits(body_bytes=20)

    def ask(content):
        sent = {"content": content, "headers": kind}
        return other("POST", "/v1/completions", limits=limits, **sent).status_code

    async def in_parts(content):
        yield content[:7]
        yield content[7:]

    for sent_as in (bytes, in_parts):
        assert [ask(sent_as(b"[" * n)) for n in (20, 21)] == [400, 413]


def test_a_body_that_takes_too_long(port):
    app = make_app(port.server, name=NAME, template="", limits=Limits(read_seconds=0.05))

    async def never():
        yield b"{"
        await asyncio.sleep(60)

    kind = {"content-type": "application/json"}
    answer = ask_app(app, "POST", "/v1/completions", content=never(), headers=kind)
    assert answer.status_code == 408


def test_paths_and_methods(http):
    assert http.get("/nowhere").status_code == 404
    refused = http.get("/v1/completions")
    assert refused.status_code == 405 and "error" in refused.json()
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


KNOWN = (
    "n stop temperature top_p top_k min_p seed logprobs stream drafts acceptance echo user"
)
KNOWN += " stream_options logit_bias prompt model max_tokens epsilon nonsense"
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
