"""What else can happen at a port: faults, limits, strangers, an end in the middle of work."""

import asyncio
import hmac
import json
import socket
import threading
import time
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import NAME, TREE, Port, alone

from medusa_jax import Options
from medusa_jax.serving import Request, Server, Stopped
from medusa_jax.serving.http import Limits, make_app
from medusa_jax.serving.http.replies import finish_reason

ASKED = {"model": NAME, "prompt": "in the hat", "max_tokens": 60, "temperature": 0}


@pytest.fixture
def http(port):
    with httpx.Client(base_url=port.url, timeout=60) as client:
        yield client


@pytest.fixture
def other(port):
    """The same server behind other settings: a function that asks it once."""

    def ask(method, path, *, limits=None, key="", **sent):
        app = make_app(port.server, name=NAME, template="", key=key, limits=limits)

        async def once():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as c:
                return await c.request(method, path, **sent)

        return asyncio.run(once())

    return ask


def raw(port, body, path="/v1/completions", head=""):
    """A connection that has sent a call."""
    link = socket.create_connection(port.address)
    content = json.dumps(body).encode()
    start = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}"
    link.sendall(f"{start}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return link


def read_all(link):
    """What comes until an answer in chunks has ended."""
    got = b""
    while not got.endswith(b"0\r\n\r\n"):
        part = link.recv(65536)
        assert part, got
        got += part
    return got.decode()


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
    ],
)
def test_bodies(http, content, kind, status, about):
    answer = http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == status
    if status != 200:
        assert about in answer.json()["error"]["message"]


def test_a_body_without_a_length_is_cut_off(http):
    def parts():
        for _ in range(200):
            yield b" " * 10_000

    kind = {"content-type": "application/json"}
    answer = http.post("/v1/completions", content=parts(), headers=kind)
    assert answer.status_code == 413


def test_a_body_of_just_the_limit(other):
    """It is read, one byte more is not, whether its length was told or not."""
    kind, limits = {"content-type": "application/json"}, Limits(body_bytes=20)

    def ask(content):
        sent = {"content": content, "headers": kind}
        return other("POST", "/v1/completions", limits=limits, **sent).status_code

    async def in_parts(content):
        yield content[:7]
        yield content[7:]

    for sent_as in (bytes, in_parts):
        assert [ask(sent_as(b"[" * n)) for n in (20, 21)] == [400, 413]


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


def test_a_client_that_vanishes_frees_its_slot(port, http, monkeypatch):
    """Streaming or not; those beside it never notice."""
    expected = alone(port.model, ASKED["prompt"], max_new_tokens=60).text
    before = counted(http, "medusa_cancelled_total")
    handles, submit_all = [], port.server.submit_all

    def submit(*asked):
        handles.extend(submit_all(*asked))
        return handles[-1:]

    monkeypatch.setattr(port.server, "submit_all", submit)
    with port.slowed(0.3):
        streaming = raw(port, ASKED | {"stream": True})
        assert b"200 OK" in streaming.recv(100)
        whole = raw(port, ASKED)
        while port.server.busy < 2:
            time.sleep(0.01)
        streaming.close()
        whole.close()
        port.wait_idle()
    assert [handle.cancelled for handle in handles] == [True, True]
    said = http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
    assert said == expected
    assert counted(http, "medusa_cancelled_total") == before + 2


def test_a_slow_reader_holds_nobody_up(port, http):
    """Its answer waits for it; its slot does not."""
    with raw(port, ASKED | {"stream": True}) as link:
        assert b"200 OK" in link.recv(20)
        port.wait_idle()
        http.post("/v1/completions", json=ASKED).raise_for_status()
        text = read_all(link)
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    said = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert said == alone(port.model, ASKED["prompt"], max_new_tokens=60).text


def test_a_reader_that_never_reads_is_left(port):
    """Nothing can be said to it any more, and its slot is wanted."""
    limits = Limits(read_seconds=0.05)
    app = make_app(port.server, name=NAME, template="", limits=limits)
    body = json.dumps(ASKED | {"stream": True}).encode()
    kind = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": kind}
    scope |= {"query_string": b""}

    async def once():
        given = [{"type": "http.request", "body": body}]

        async def receive():
            return given.pop() if given else await asyncio.sleep(60)

        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        await asyncio.wait_for(app(scope, receive, send), 30)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/metrics")).text

    with port.slowed(0.1):
        metrics = asyncio.run(once())
    assert 'medusa_calls_total{endpoint="completions",status="408"} 1.0' in metrics
    assert "medusa_cancelled_total 1.0" in metrics


def test_a_full_queue(port, http):
    short = Request("in", Options(max_new_tokens=2))
    with port.held():
        handles = [port.server.submit(short) for _ in range(port.server.queue)]
        refused = http.post("/v1/completions", json=ASKED)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    for handle in handles:
        assert list(handle)[-1].ending


def test_a_key(other):
    for sent in ({}, {"authorization": "Bearer no"}):
        for path in ("/v1/models", "/metrics"):
            assert other("GET", path, key="open sesame", headers=sent).status_code == 401
        refused = other("POST", "/v1/completions", key="k", headers=sent, json={})
        assert (
            refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        )
    for path in ("/", "/health"):
        assert other("GET", path, key="k").status_code == 200
    right = {"authorization": "Bearer open sesame"}
    assert other("GET", "/v1/models", key="open sesame", headers=right).status_code == 200
    odd = {"authorization": "Bearer \u00e9".encode()}
    assert other("GET", "/v1/models", key="k", headers=odd).status_code == 401


def test_keys_are_compared_in_constant_time(other, monkeypatch):
    compared = []

    def compare(given, wanted):
        compared.append((given, wanted))
        return True

    monkeypatch.setattr(hmac, "compare_digest", compare)
    sent = {"authorization": "Bearer no"}
    assert other("GET", "/v1/models", key="k", headers=sent).status_code == 200
    assert compared == [(b"Bearer no", b"Bearer k")]


def test_an_answer_that_takes_too_long(port, other):
    limits = Limits(seconds=0.05)
    with port.held():
        whole, streamed = (
            other("POST", "/v1/completions", limits=limits, json=ASKED | {"stream": stream})
            for stream in (False, True)
        )
    assert whole.status_code == 504
    assert json.loads(streamed.text.removeprefix("data: "))["error"]["code"] == "timeout"


def test_a_body_that_takes_too_long(port):
    app = make_app(port.server, name=NAME, template="", limits=Limits(read_seconds=0.05))

    async def never():
        yield b"{"
        await asyncio.sleep(60)

    async def once():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            kind = {"content-type": "application/json"}
            return await client.post("/v1/completions", content=never(), headers=kind)

    assert asyncio.run(once()).status_code == 408


def counted(http, name):
    """The sum of a counter over its labels."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_metrics_count_what_was_done(http):
    totals = ("prompt_tokens", "reused_tokens", "generated_tokens", "answers", "steps")
    names = [f"{name}_total" for name in (*totals, "calls")]
    names += [
        f"{name}_seconds_count" for name in ("queue", "first_token", "between_tokens")
    ]
    before = {name: counted(http, f"medusa_{name}") for name in names}
    answer = http.post("/v1/completions", json=ASKED | {"n": 2}).json()
    after = {name: counted(http, f"medusa_{name}") for name in names}
    grown = {name: after[name] - before[name] for name in names}
    steps = sum(choice["medusa"]["steps"] for choice in answer["choices"])
    read, reused = (
        answer["usage"]["prompt_tokens"],
        sum(choice["medusa"]["reused_tokens"] for choice in answer["choices"]),
    )
    assert answer["usage"]["total_tokens"] == read + 120
    assert grown == {
        "prompt_tokens_total": 2 * read,
        "reused_tokens_total": reused,
        "generated_tokens_total": 120,
        "answers_total": 2,
        "steps_total": steps,
        "calls_total": 1,
        "queue_seconds_count": 2,
        "first_token_seconds_count": 2,
        "between_tokens_seconds_count": 2,
    }
    assert counted(http, "medusa_slots ") == 3 and counted(http, "medusa_busy_slots") == 0


WORDS = st.sampled_from(["in", "the hat", "abc", "", "\u00e9\U0001f40d", "</s>", "d" * 90])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    WORDS,
    st.lists(st.integers(-1, 50), max_size=3),
    st.lists(WORDS, max_size=3),
    st.dictionaries(WORDS, WORDS, max_size=2),
)
KNOWN = [
    "n",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logprobs",
    "stream",
]
KNOWN += ["drafts", "acceptance", "echo", "user", "stream_options", "logit_bias", "prompt"]
FIELDS = st.sampled_from([*KNOWN, "model", "max_tokens", "epsilon", "nonsense"])


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


def test_an_end_in_the_middle_of_work(port):
    """What SIGTERM starts: running answers are finished, new calls find nobody."""
    expected = alone(port.model, ASKED["prompt"], max_new_tokens=60).text
    second = Port(port.server, port.app)  # another listener of the same server
    with port.held():
        link = raw(second, ASKED | {"stream": True})
        while not port.server.waiting:
            time.sleep(0.01)
        second.uvicorn.should_exit = True
        while True:
            try:
                socket.create_connection(second.address).close()
            except ConnectionRefusedError:
                break
            time.sleep(0.02)
    text = read_all(link)
    second.close()
    said = [
        json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")
    ]
    assert "".join(event["choices"][0]["text"] for event in said) == expected


def test_a_closed_server_takes_nothing(port):
    with Server(port.model, slots=3, trees={3: TREE}, chunk_steps=3) as server:
        handle = server.submit(Request("in", Options(max_new_tokens=5)))
    assert list(handle)[-1].ending.result.new_tokens == 5  # what was submitted is answered
    app = make_app(server, name=NAME, template="")

    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/health"), await client.post(
                "/v1/completions", json=ASKED
            )

    for answer in asyncio.run(ask()):
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_told_to_everybody(port):
    """To who is answered, to who waits, and to who comes later."""
    server = Server(port.model, slots=3, trees={3: TREE}, chunk_steps=3)
    held, over = threading.Event(), threading.Event()

    def step():
        held.set()
        over.wait()
        raise RuntimeError("the device is gone")

    server._scheduler.step = step
    handles = [server.submit(Request("in"))]
    held.wait()
    handles.append(server.submit(Request("the")))
    over.set()
    for handle in handles:
        with pytest.raises(Stopped, match="the device is gone"):
            list(handle)
    with pytest.raises(Stopped):
        server.submit(Request("in"))
    server.close()
    assert not server.running


def test_a_full_context_is_openai_s_length():
    ending = SimpleNamespace(result=SimpleNamespace(finish_reason="context"))
    assert finish_reason(ending) == "length"
