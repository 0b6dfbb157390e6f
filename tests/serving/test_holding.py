"""Connections that a client opens and then leaves, and expensive calls: all other clients are answered soon."""

import contextlib
import json
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from served import ASKED, QUEUE, listening, raw, until
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import medusa_jax
from medusa_jax.serving import Server
from medusa_jax.serving.http import Limits

LARGE = 30 << 20  # more than the buffers of a connection hold
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX: "


def large_app():
    async def large(request):
        return Response(b"x" * LARGE)

    return Starlette(routes=[Route("/", large)])


def connect(port, sent=b"", receive=None):
    link = socket.socket()
    if receive:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    link.settimeout(20)
    link.connect(port.address)
    link.sendall(sent)
    return link


def closed(links):
    """Those whose other end is closed."""
    readable, *_ = select.select(links, [], [], 0)
    return [link for link in readable if not came(link)]


def came(link):
    try:
        return link.recv(65536)
    except ConnectionResetError:
        return b""


def check_health(port):
    """A new client is answered soon."""
    start = time.perf_counter()
    link = connect(port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    with link:
        assert b"200 OK" in came(link)
    assert time.perf_counter() - start < 0.5


def open_connections(port):
    return len(port.uvicorn.server_state.connections)


def test_half_sent_heads(port):
    """60 clients send half a head, a third of them a byte now and then: all are closed at the deadline."""
    with listening(port.server, limits=Limits(head_seconds=1.0)) as attacked:
        start = time.monotonic()
        links, ended = [connect(attacked, HALF) for _ in range(60)], set()
        while len(ended) < len(links):
            assert time.monotonic() - start < 10
            check_health(attacked)
            ended |= {link for link in links if link in closed(links)}
            for link in set(links[::3]) - ended:
                with contextlib.suppress(OSError):
                    link.sendall(b"x")
            time.sleep(0.1)
        assert time.monotonic() - start > 0.9
        until(lambda: open_connections(attacked) == 0)
    for link in links:
        link.close()


def test_more_connections_than_there_may_be(port):
    """Those that wait for their client make room, the oldest first; a call that is being answered stays."""
    with listening(port.server, limits=Limits(connections=10)) as attacked:
        with port.held():
            working = raw(attacked, ASKED)
            until(lambda: port.server.waiting)
            body = HALF + b"x\r\nContent-Length: 9\r\n\r\n{"
            links = []
            for i in range(60):
                links.append(connect(attacked, (b"", HALF, body)[i % 3]))
                if i % 6 == 5:
                    check_health(attacked)
            assert len(closed(links)) >= 50 and links[-1] not in closed(links)
            assert open_connections(attacked) <= 11
        assert b"200 OK" in came(working)
        for link in (*links, working):
            link.close()


def test_half_of_a_second_request(port):
    """uvicorn's own deadline between requests ends with the first byte of the next."""
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        listening(port.server, limits=Limits(head_seconds=0.3)) as other,
        connect(other, whole) as link,
    ):
        assert b"200 OK" in came(link)
        time.sleep(0.5)
        assert not closed([link])  # idle, which is no fault
        link.sendall(HALF)
        start = time.monotonic()
        until(lambda: closed([link]), 3)
        assert time.monotonic() - start > 0.2


def test_a_client_that_reads_nothing_loses_its_connection(port):
    with (
        listening(port.server, limits=Limits(read_seconds=0.3), app=large_app()) as other,
        connect(other, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", receive=1 << 16),
    ):
        until(lambda: open_connections(other))
        until(lambda: not open_connections(other), 5)


MEGABYTE = 1_000_000  # with the rest of its call just below the limit
WORST = 0.5


@contextlib.contextmanager
def victim(port):
    """A client that streams plain answers all the time; the list of seconds that each piece took.

    It is a thread of the server's process, so a piece counts from the one before: while the
    interpreter is held, not even its clock is read.
    """
    waits, over = [], threading.Event()
    body = {"prompt": "the cat", "max_tokens": 200, "stream": True, "logit_bias": {2: -100}}

    def ask():
        with httpx.Client(base_url=port.url, timeout=60) as http:
            while not over.is_set():
                before = time.perf_counter()
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        now = time.perf_counter()
                        waits.append(now - before)
                        before = now
                        if over.is_set():
                            return

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            while len(waits) < 10:  # its programs are compiled
                time.sleep(0.01)
            waits.clear()
            yield waits
        finally:
            over.set()
            asking.result()


def attacked(port, body, path="/v1/completions"):
    """The answer to a call, during which the victim never waits for long."""
    sent = json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    with victim(port) as waits, httpx.Client(base_url=port.url, timeout=120) as http:
        time.sleep(0.1)
        answer = http.post(path, content=sent, headers=kind)
    assert max(waits) < WORST
    return answer


@pytest.mark.wide
def test_a_megabyte_that_has_to_be_tokenised(port):
    """With this vocabulary, the length in tokens is unknown before tokenising."""
    body = {"prompt": "the cat and " * (MEGABYTE // 12), "n": 2}
    answer = attacked(port, body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture(scope="module")
def demo_port():
    model = medusa_jax.load()
    trees = {4: model.parse_tree("chain:2")}
    with (
        Server(model, slots=4, trees=trees, queue=QUEUE) as server,
        listening(server, "plain") as port,
    ):
        yield port


@pytest.mark.wide
def test_a_megabyte_that_is_too_long_whatever_it_says(demo_port):
    """Refused before it is tokenised."""
    turn = {"role": "user", "content": "def parse(text): " * (MEGABYTE // 17)}
    answer = attacked(demo_port, {"messages": [turn]}, "/v1/chat/completions")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" in answer.text  # a bound: the number of its tokens is not known
