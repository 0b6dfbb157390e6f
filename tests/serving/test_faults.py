"""Clients that leave, that do not read, that wait too long, and those that are too many."""

import json
import time

import pytest
from served import ASKED, alone, counted, events_of, raw, read_all, texts_of

from medusa_jax import Options
from medusa_jax.serving import Request
from medusa_jax.serving.http import Limits


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
    with port.slowed(0.3):
        streaming = raw(port, ASKED | {"stream": True})
        assert b"200 OK" in streaming.recv(100)
        whole = raw(port, ASKED)
        while port.server.busy < 2:
            time.sleep(0.01)
        streaming.close()
        whole.close()
        port.wait_idle()
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
