"""The end of a server, wanted or not: who is answered, and what all others get."""

import socket
import time

from served import (
    ASKED,
    NAME,
    TREE,
    Port,
    alone,
    ask_app,
    events_of,
    raw,
    read_all,
    texts_of,
)

from medusa_jax import Options
from medusa_jax.serving import Request, Server
from medusa_jax.serving.http import make_app


def test_an_end_in_the_middle_of_work(port):
    """What SIGTERM starts: running answers are finished, new calls are refused."""
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
    assert texts_of(events_of(text)) == {0: expected}


def test_a_closed_server_takes_nothing(port):
    with Server(port.model, slots=3, trees={3: TREE}, chunk_steps=3) as server:
        handle = server.submit(Request("in", Options(max_new_tokens=5)))
    assert list(handle)[-1].ending.result.new_tokens == 5  # what was submitted is answered
    app = make_app(server, name=NAME, template="")

    for asked in (("GET", "/health"), ("POST", "/v1/completions")):
        answer = ask_app(app, *asked, json=ASKED)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"


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
        while port.server.waiting < 2:
            time.sleep(0.01)
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
