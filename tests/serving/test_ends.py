"""Errors of the device, clients that leave or wait too long, and the end of a server: who is answered, and what all others get."""

import json
import socket
import threading
import time

import numpy as np
import pytest
from served import (
    ASKED,
    NAME,
    TREE,
    Port,
    alone,
    ask_app,
    counted,
    events_of,
    raw,
    read_all,
    texts_of,
    until,
)

from medusa_jax import Options, UserError
from medusa_jax.serving import Request, Server, Stopped, programs, prompt_scores
from medusa_jax.serving.batch import Batch
from medusa_jax.serving.http import Limits, make_app
from medusa_jax.serving.job import Group
from medusa_jax.serving.request import NoScores
from medusa_jax.serving.server import MOST_FAILURES

PATH = "/v1/completions"


def test_health_waits_for_the_first_program(port, http, monkeypatch):
    """The page does not, and calls wait in the queue."""
    compiled, told, true = threading.Event(), [], programs.Compiler._compile

    def slow(self, asked):
        compiled.wait(60)
        return true(self, asked)

    monkeypatch.setattr(programs.Compiler, "_compile", slow)
    port.server.prepare(lambda: told.append(port.server.ready))
    try:
        answer = http.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "compiling")
        assert http.get("/").status_code == 200 and not told
    finally:
        compiled.set()
    until(lambda: told == [True])
    assert http.get("/health").status_code == 200


def test_an_end_in_the_middle_of_work(port):
    """What SIGTERM starts: running answers are finished, new calls are refused."""
    expected = alone(port.model, ASKED["prompt"], max_new_tokens=60).text
    second = Port(port.server, port.app)  # another listener of the same server
    with port.held():
        link = raw(second, ASKED | {"stream": True})
        until(lambda: port.server.waiting)
        second.uvicorn.should_exit = True
        while True:
            try:
                socket.create_connection(second.address).close()
            except ConnectionRefusedError:
                break
            time.sleep(0.02)
    text = read_all(link)
    second.close()
    assert texts_of(events_of(text)) == {0: expected}


def test_a_closed_server_takes_nothing(port):
    with Server(port.model, slots=3, trees={3: TREE}) as server:
        handle = server.submit(Request("in", Options(max_new_tokens=5)))
    assert list(handle)[-1].ending.result.new_tokens == 5  # what was submitted is answered
    app = make_app(server, name=NAME, template="")

    for asked in (("GET", "/health"), ("POST", "/v1/completions")):
        answer = ask_app(app, *asked, json=ASKED)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"


@pytest.mark.parametrize(
    "fields",
    [
        {"slots": "4"}, {"slots": 2.5}, {"slots": 0}, {"queue": 0}, {"queue": "a"}, {"foo": 1},
        {"max_prompt_tokens": -3}, {"max_prompt_tokens": 0}, {"max_new_tokens": -1}, {"max_new_tokens": 0},
        {"max_new_tokens": "a"}, {"trees": {2: "chain:2"}}, {"trees": {0: TREE}}, {"trees": {9: TREE}},
    ],
)  # fmt: skip
def test_servers_that_cannot_be(port, fields):
    with pytest.raises(UserError, match=next(iter(fields)).rstrip("s")):
        Server(port.model, **fields)


def test_an_end_that_waits_no_longer(port):
    """Calls that outlast the time for it get an error: whole, streamed, half sent. Their slots are free."""
    port.wait_idle()
    app = make_app(port.server, name=NAME, template="")
    ending = Port(port.server, app, drain=1)
    with port.held():
        whole, streamed = raw(ending, ASKED), raw(ending, ASKED | {"stream": True})
        half = socket.create_connection(ending.address)
        kind = "Host: x\r\nContent-Type: application/json\r\nContent-Length: 99"
        half.sendall(f"POST /v1/completions HTTP/1.1\r\n{kind}\r\n\r\n{{".encode())
        until(lambda: port.server.waiting == 2)
        start = time.monotonic()
        ending.close()
        assert time.monotonic() - start < 6
        for link in (whole, half, streamed):
            link.settimeout(10)
            got = b"".join(iter(lambda link=link: link.recv(65536), b""))
            assert got.startswith(b"HTTP/1.1 503 ") == (link is not streamed)
            assert b"the server is ending" in got and b"server_error" in got
            link.close()
    port.wait_idle()


# What a supervisor sees of a server whose device is gone.


@pytest.fixture
def server(port):
    with Server(port.model, slots=3, trees={3: TREE}) as server:
        yield server


def answered(server, **fields):
    """The tokens of one answer."""
    [*_, last] = server.submit(Request("in the", Options(max_new_tokens=9), **fields))
    return last.ending.result.token_ids


def test_a_server_goes_on_after_an_error(server, monkeypatch, capfd):
    """The clients of what was on the device get an error; the next answer is unchanged."""
    expected = answered(server)

    def failing(*given):
        monkeypatch.undo()
        raise MemoryError("out of memory")

    monkeypatch.setattr(server._scheduler._batch, "run", failing)
    with pytest.raises(Stopped, match="out of memory"):
        answered(server)
    assert server.running and answered(server) == expected
    assert "its requests are lost: out of memory" in capfd.readouterr().err


def test_scores_that_are_no_numbers_end_one_answer(server, monkeypatch):
    """With an error; the row's next answer is as always, though its cache had NaN."""
    model, expected = server.model, answered(server)
    whole, backbone = model.variables, model.variables["backbone"]
    table = backbone["embed_tokens"]["embedding"].at[expected[3]].set(np.nan)
    poisoned = whole | {"backbone": backbone | {"embed_tokens": {"embedding": table}}}
    monkeypatch.setattr(model, "variables", poisoned)
    for _ in range(4):  # in every row
        with pytest.raises(NoScores, match="scores are NaN"):
            answered(server)
    body = ASKED | {"prompt": "in the", "max_tokens": 9}
    answer = ask_app(
        make_app(server, name=NAME, template=""), "POST", "/v1/completions", json=body
    )
    assert answer.status_code == 500 and "scores are NaN" in answer.text
    monkeypatch.undo()
    assert [answered(server) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("compiles", [True, False])
def test_errors_one_after_the_other_end_it(server, compiles, monkeypatch):
    """Those of steps, or of a device that compiles nothing."""
    ended, asked = threading.Event(), 0
    server.when_failed(ended.set)

    def broken(*given):
        raise RuntimeError("the device is gone")

    place = (server._scheduler._batch, "begin") if compiles else (Batch, "compile")
    monkeypatch.setattr(*place, broken)
    monkeypatch.setattr(programs, "RETRY_SECONDS", 0.0)
    while server.running:
        asked += 1
        assert asked < 100
        with pytest.raises(Stopped, match=r"the device is gone|no program can be compiled"):
            answered(server)
    assert asked == MOST_FAILURES or not compiles
    assert ended.wait(10) and server.failed
    with pytest.raises(Stopped):
        answered(server)
    app = make_app(server, name=NAME, template="")
    assert ask_app(app, "GET", "/health").status_code == 503


def test_a_slow_compilation_delays_neither_a_stream_nor_the_end(server, monkeypatch):
    answered(server)
    true, begun, over = Batch.compile, threading.Event(), threading.Event()

    def compile(self, group, *size):
        if group.logprobs:
            begun.set()
            over.wait(60)
        true(self, group, *size)

    monkeypatch.setattr(Batch, "compile", compile)
    waits = server.submit(Request("in the", Options(max_new_tokens=3, logprobs=1)))
    assert begun.wait(10)
    before, gaps = time.monotonic(), []
    for _ in server.submit(Request("in the", Options(max_new_tokens=60))):
        gaps.append(time.monotonic() - before)
        before = time.monotonic()
    waits.cancel()
    server.close()
    assert len(gaps) > 1 and max(gaps) < 1 and time.monotonic() - before < 1
    over.set()


@pytest.mark.parametrize("planned", [True, False])
def test_what_cannot_be_compiled(server, planned, monkeypatch, capfd):
    """Ahead of any request, it ends the warm-up; else only the request that asked for it gets the error."""
    expected, true = answered(server), Batch.compile

    def compile(self, group, *size):
        if group.rule == "typical":
            raise MemoryError("out of memory")
        true(self, group, *size)

    monkeypatch.setattr(Batch, "compile", compile)
    if planned:
        server.warm_up(9, [Group(rule="typical"), Group(False, "typical")])
        assert capfd.readouterr().err.count("compiling ahead ends here") == 1
    else:
        with pytest.raises(Stopped, match="out of memory"):
            answered(server, acceptance="typical")
    assert answered(server) == expected


@pytest.fixture
def submitted(port, monkeypatch):
    """The handles of what is asked."""
    handles, submit_all = [], port.server.submit_all

    def submit(*asked):
        new = submit_all(*asked)
        handles.extend(new)
        return new

    monkeypatch.setattr(port.server, "submit_all", submit)
    return handles


def test_a_client_that_vanishes_frees_its_slot(port, http, submitted):
    """Streaming or not; their neighbours never notice."""
    expected = alone(port.model, ASKED["prompt"], max_new_tokens=60).text
    gone = 'medusa_calls_total{endpoint="completions",status="499"}'
    before = counted(http, "medusa_cancelled_total"), counted(http, gone)
    with port.held():  # the program of two rows is compiled
        short = Request("in", Options(max_new_tokens=2))
        both = [port.server.submit(short) for _ in range(2)]
    for handle in both:
        assert list(handle)[-1].ending
    submitted.clear()
    with port.slowed(1.0):
        streaming = raw(port, ASKED | {"stream": True})
        assert b"200 OK" in streaming.recv(100)
        whole = raw(port, ASKED)
        until(lambda: port.server.busy == 2)
        chunks = port.server._scheduler.chunks
        streaming.close()
        whole.close()
        port.wait_idle()
    # Of one step each: texts have 60 tokens.
    assert port.server._scheduler.chunks < chunks + 8
    assert [handle.cancelled for handle in submitted] == [True, True]
    said = http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
    assert said == expected
    after = counted(http, "medusa_cancelled_total"), counted(http, gone)
    assert after == (before[0] + 2, before[1] + 2)


def test_a_slow_reader_holds_nobody_up(port, http):
    """Its answer waits for it; its slot does not."""
    with raw(port, ASKED | {"stream": True}) as link:
        assert b"200 OK" in link.recv(20)
        port.wait_idle()
        http.post("/v1/completions", json=ASKED).raise_for_status()
        text = read_all(link)
    expected = alone(port.model, ASKED["prompt"], max_new_tokens=60).text
    assert texts_of(events_of(text)) == {0: expected}


def test_a_full_queue(port, http):
    short = Request("in", Options(max_new_tokens=2))
    count = 'medusa_calls_total{endpoint="completions",status="429"}'
    before = counted(http, count), counted(http, "medusa_calls_total")
    with port.held():
        handles = [port.server.submit(short) for _ in range(port.server.queue)]
        refused = http.post("/v1/completions", json=ASKED)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    after = counted(http, count), counted(http, "medusa_calls_total")
    assert after == (before[0] + 1, before[1] + 1)
    for handle in handles:
        assert list(handle)[-1].ending


SCORED = ASKED | {"prompt": ["in the hat"] * 3, "echo": True, "logprobs": 1}


def test_scoring_ends_with_its_client(port, http, monkeypatch):
    """And counts, as work and as waiting: nothing is learned or compiled ahead while prompts are scored."""
    pieces, go_on, true = [], threading.Event(), prompt_scores.read_scored

    def read(*given):
        pieces.append(port.server.idle)
        go_on.wait(60)
        time.sleep(0.2)
        return true(*given)

    monkeypatch.setattr(prompt_scores, "read_scored", read)
    link = raw(port, SCORED)
    until(lambda: pieces)
    assert counted(http, "vllm:num_requests_waiting") == 3
    link.close()
    until(lambda: port.server.idle)
    go_on.set()
    for limit in (0, 1):
        body = SCORED | {"prompt": "in the hat", "max_tokens": limit}
        own = http.post(PATH, json=body).json()["choices"][0]["medusa"]
        assert own["waited_seconds"] + own["prefill_seconds"] > 0.2
    assert pieces == [False] * 3


@pytest.mark.parametrize("waiting", [True, False])
def test_an_answer_that_takes_too_long(port, other, submitted, waiting):
    """Before its first piece, or piece by piece; no slot works for it any longer."""
    limits = Limits(seconds=0.4)
    with port.held() if waiting else port.slowed(0.1):
        whole, streamed = (
            other("POST", "/v1/completions", limits=limits, json=ASKED | {"stream": stream})
            for stream in (False, True)
        )
        assert [handle.cancelled for handle in submitted] == [True, True]
    assert whole.status_code == 504 and whole.json()["error"]["code"] == "timeout"
    *pieces, last, _ = streamed.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert bool(pieces) != waiting
