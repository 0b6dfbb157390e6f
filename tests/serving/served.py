"""A server on a free port of this process, for tests."""

import contextlib
import json
import socket
import threading
import time

import uvicorn
from tiny_model import write_model

import medusa_jax
from medusa_jax import Options, Tree
from medusa_jax.serving import Server
from medusa_jax.serving.http import make_app

TREE = Tree.from_choices([[0], [1], [0, 0], [0, 0, 0]])
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}u{{ m['content'] }}."
    "{% else %}a{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
NAME = "tiny"
QUEUE = 6


def write_chat_model(path, **fields):
    """`tiny_model.write_model` with a chat template."""
    write_model(path, **fields)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))


def load_model(path):
    """Its drafts are often right: heads that are not trained guess what the LM head says."""
    return medusa_jax.load(str(path), str(path / "heads"), tree=TREE)


class Port:
    """One server behind one port.

    Attributes:
      server, model: what answers.
      url: where.
      uvicorn: what listens.
    """

    def __init__(self, server, app):
        self.server, self.model, self.app = server, server.model, app
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self.uvicorn.run, args=([listener],))
        self._thread.start()

    def close(self):
        self.uvicorn.should_exit = True
        self._thread.join()

    @contextlib.contextmanager
    def before_each_turn(self, wait):
        """Every turn of the server waits first; whoever waits then stops when this is left."""
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
        """No slot leaks: soon nobody has one."""
        end = time.monotonic() + seconds
        while self.server.busy or self.server.waiting:
            assert time.monotonic() < end, "a slot is still taken"
            time.sleep(0.01)


@contextlib.contextmanager
def port_of(model, **fields):
    """A server of three rows on a port of its own."""
    with Server(model, slots=3, trees={3: TREE}, queue=QUEUE, chunk_steps=3) as server:
        port = Port(server, make_app(server, name=NAME, template="", **fields))
        try:
            yield port
        finally:
            port.close()


def alone(model, prompt, **options):
    """The result of plain decoding without any other."""
    return model.generate([prompt], Options(**options), tree="none")[0]
