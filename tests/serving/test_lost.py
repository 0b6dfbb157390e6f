"""Errors of the device: no request waits in vain, and the server goes on."""

import threading
import time

import pytest
from served import NAME, TREE, ask_app

from medusa_jax import Options
from medusa_jax.serving import Request, Server, Stopped, programs
from medusa_jax.serving.batch import Batch
from medusa_jax.serving.http import make_app
from medusa_jax.serving.job import Group
from medusa_jax.serving.server import MOST_FAILURES


class Lost(Exception):
    """The device is gone."""


def fail_at(batch, call, number, monkeypatch):
    """Let the n-th call from now on raise, and those after it work."""
    true, left = getattr(batch, call), [number]

    def raising(*given):
        left[0] -= 1
        if left[0] == 0:
            raise Lost("out of memory")
        return true(*given)

    monkeypatch.setattr(batch, call, raising)


@pytest.fixture
def server(port):
    with Server(port.model, slots=3, trees={3: TREE}, chunk_steps=3) as server:
        yield server


@pytest.mark.parametrize("call", ["begin", "read", "insert", "run"])
def test_a_server_goes_on_after_an_error(server, call, monkeypatch, capfd):
    """What was on the device is lost, and its clients get an error; the next answer is unchanged."""
    [*_, last] = server.submit(Request("in the", Options(max_new_tokens=9)))
    fail_at(server._scheduler._batch, call, 1, monkeypatch)
    with pytest.raises(Stopped, match="out of memory"):
        list(server.submit(Request("in the", Options(max_new_tokens=9))))
    assert server.running
    [*_, again] = server.submit(Request("in the", Options(max_new_tokens=9)))
    assert again.ending.result.token_ids == last.ending.result.token_ids
    assert "its requests are lost: out of memory" in capfd.readouterr().err


def test_errors_one_after_the_other_end_it(server, monkeypatch):
    ended = threading.Event()
    server.when_failed(ended.set)

    def broken(*given):
        raise Lost("the device is gone")

    monkeypatch.setattr(server._scheduler._batch, "begin", broken)
    for n in range(MOST_FAILURES):
        assert server.running == (n < MOST_FAILURES)
        with pytest.raises(Stopped, match="the device is gone"):
            list(server.submit(Request("in")))
    assert ended.wait(10) and server.failed and not server.running
    with pytest.raises(Stopped):
        server.submit(Request("in"))
    app = make_app(server, name=NAME, template="")
    assert ask_app(app, "GET", "/health").status_code == 503


def test_a_device_that_compiles_nothing_ends_it(port, monkeypatch):
    def compile(*given):
        raise Lost("out of memory")

    monkeypatch.setattr(Batch, "compile", compile)
    monkeypatch.setattr(programs, "RETRY_SECONDS", 0.0)
    with Server(port.model, slots=3, trees={3: TREE}, chunk_steps=3) as server:
        end = time.monotonic() + 30
        while server.running:
            assert time.monotonic() < end
            with pytest.raises(Stopped):
                list(server.submit(Request("in")))
    assert server.failed


def test_a_slow_compilation_delays_neither_a_stream_nor_the_end(server, monkeypatch):
    list(server.submit(Request("in the", Options(max_new_tokens=3))))
    true, begun, over = Batch.compile, threading.Event(), threading.Event()

    def compile(self, group, n_rows, slots):
        if group.logprobs:
            begun.set()
            over.wait(60)
        true(self, group, n_rows, slots)

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
def test_what_cannot_be_compiled_costs_only_who_needs_it(
    server, planned, monkeypatch, capfd
):
    """Ahead of any request, it ends the warm-up; else the request that asked for it gets the error."""
    asked = Request("in the", Options(max_new_tokens=9))
    [*_, last] = server.submit(asked)
    true = Batch.compile

    def compile(self, group, n_rows, slots):
        if group.rule == "typical":
            raise Lost("out of memory")
        true(self, group, n_rows, slots)

    monkeypatch.setattr(Batch, "compile", compile)
    if planned:
        server.warm_up(9, [Group(True, "typical"), Group(False, "typical")])
        assert not server.warming_up
        assert capfd.readouterr().err.count("compiling ahead ends here") == 1
    else:
        with pytest.raises(Stopped, match="out of memory"):
            list(server.submit(Request("in the", acceptance="typical")))
    [*_, again] = server.submit(asked)
    assert again.ending.result.token_ids == last.ending.result.token_ids
