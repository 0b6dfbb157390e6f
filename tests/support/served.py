"""A server on a free port of this process, for tests."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx2 as httpx
from tiny import write_chat_model

import medusa_jax
from medusa_jax import Options, Tree
from medusa_jax.serving import Server
from medusa_jax.serving.http import Limits, make_app, make_listener

TREE = Tree.from_choices([[0], [1], [0, 0], [0, 0, 0]])
NAME = "tiny"
QUEUE = 6
# A call, and how many tokens it is answered with.
ASKED = {"model": NAME, "prompt": "in the hat", "max_tokens": 60, "temperature": 0}


def until(condition, seconds=60):
    """Wait for it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def load_model(path, **fields):
    """Its drafts are often right: heads that are not trained guess what the LM head says."""
    return medusa_jax.load(str(path), str(path / "heads"), tree=TREE, **fields)


class Port:
    """One server at one port.

    Attributes:
      server, model: what answers.
      url: where.
      uvicorn: what listens.
    """

    def __init__(self, server, app, limits=None, drain=60):
        self.server, self.model, self.app = server, server.model, app
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        # Connections stay open if this process is stopped for a while.
        self.uvicorn = make_listener(app, limits or Limits(idle_seconds=600), drain)
        self._thread = threading.Thread(target=self.uvicorn.run, args=([listener],))
        self._thread.start()

    def close(self):
        self.uvicorn.should_exit = True
        self._thread.join()

    @contextlib.contextmanager
    def before_each_turn(self, wait):
        """Every turn of the server waits first; one that waits at the end goes on."""
        scheduler, over = self.server._scheduler, threading.Event()
        true_step = scheduler.step

        def step():
            wait(over)
            return true_step()

        scheduler.step = step
        try:
            yield
        finally:
            scheduler.step = true_step
            over.set()

    def held(self):
        """Nothing is answered in here."""
        return self.before_each_turn(lambda over: over.wait())

    def slowed(self, seconds):
        """Turns take so long at least."""
        return self.before_each_turn(lambda over: over.wait(seconds))

    def wait_idle(self, seconds=60):
        """No slot leaks: soon all are free."""
        until(lambda: not (self.server.busy or self.server.waiting), seconds)


@contextlib.contextmanager
def listening(server, template="", limits=None, app=None):
    """The server, or another application, at a port with these settings."""
    app = app or make_app(server, name=NAME, template=template, limits=limits)
    port = Port(server, app, limits)
    try:
        yield port
    finally:
        port.close()


@contextlib.contextmanager
def port_of(path, *template, **sizes):
    """A server of three rows of a tiny chat model, written to `path`, at a new port."""
    write_chat_model(path, *template, **sizes)
    model = load_model(path)
    fields = {"trees": {3: TREE}, "queue": QUEUE}
    with Server(model, slots=3, **fields) as server, listening(server) as port:
        server._scheduler._chunks.most_steps = 3
        yield port


def alone(model, prompt, **options):
    """The result of plain decoding without any other."""
    return model.generate([prompt], Options(**options), tree="none")[0]


def ask_app(app, method, path, **sent):
    """The answer of an application that listens nowhere."""

    async def once():
        transport = httpx.ASGITransport(app=app)
        given = {"transport": transport, "base_url": "http://x", "verify": False}
        async with httpx.AsyncClient(**given) as client:
            return await client.request(method, path, **sent)

    return asyncio.run(once())


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


def events_of(stream):
    """The objects of a stream that came to its end."""
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def texts_of(events):
    """What they said of a completion, by the number of the choice."""
    said = {}
    for event in events:
        [choice] = event["choices"]
        said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    return said


def both(http, path, **body):
    """The only choice of a whole answer; a stream of it says the same, log-probabilities too."""
    [whole] = http.post(path, json=body).raise_for_status().json()["choices"]
    stream = http.post(path, json=body | {"stream": True}).text
    pieces = [event["choices"][0] for event in events_of(stream)]
    said = [p["text"] if "text" in p else p["delta"].get("content", "") for p in pieces]
    text = whole["text"] if "text" in whole else whole["message"]["content"]
    assert "".join(said) == text
    reasons = [p["finish_reason"] for p in pieces]
    assert reasons == [None] * (len(pieces) - 1) + [whole["finish_reason"]]
    for name in whole["logprobs"] or ():
        parts = [p["logprobs"][name] for p in pieces if p["logprobs"]]
        joined = [one for part in parts for one in part or ()]
        assert joined == (whole["logprobs"][name] or [])
    return whole


def counted(http, name):
    """The sum of a counter over its labels."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
