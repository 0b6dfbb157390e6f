"""The end of a server, wanted or not: who is answered, and what all others get."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import children
import pytest
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
from tiny import write_model

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


BROKEN = """
import sys
import threading
from medusa_jax.commands import serve
from medusa_jax.serving.batch import Batch

true = Batch.begin

def begin(*given):
    if threading.current_thread().name == "decoding":
        raise RuntimeError("the device is gone")
    return true(*given)

Batch.begin = begin
sys.exit(serve.main(sys.argv[1:]))
"""


@pytest.mark.wide
def test_a_process_whose_device_is_gone_exits(tmp_path):
    """With a status that is not 0, after all calls got an error."""
    write_model(tmp_path)
    flags = ["--model", str(tmp_path), "--port", "0", "--warm_up", "0", "--name", "tiny"]
    server = subprocess.Popen(
        [sys.executable, "-c", BROKEN, *flags],
        env=children.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr
        line = next(line for line in server.stderr if "is the page" in line)
        url = line.split("the page, ")[1].split()[0]
        body = json.dumps({"model": "tiny", "prompt": "in"}).encode()
        kind = {"content-type": "application/json"}
        for _ in range(3):
            call = urllib.request.Request(f"{url}/completions", body, kind)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(call, timeout=60)
            assert refused.value.code == 503
        assert server.wait(30) == 1
        assert "ended after repeated errors" in server.stderr.read()
    finally:
        server.kill()
        server.wait()
