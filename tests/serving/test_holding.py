"""Connections that a client opens and then leaves: half a request, nothing read, too many of them."""

import contextlib
import select
import socket
import time

from served import ASKED, listening, raw, until
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

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
