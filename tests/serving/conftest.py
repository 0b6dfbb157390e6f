"""One server for all tests of the port, so that its programs are compiled once."""

import httpx2 as httpx
import openai
import pytest
from served import NAME, ask_app, load_model, port_of
from tiny import write_chat_model

from medusa_jax.serving import programs
from medusa_jax.serving.http import make_app

programs.SETTLE_SECONDS = 0.0


@pytest.fixture(scope="session")
def shared_port(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    write_chat_model(path)
    with port_of(load_model(path)) as port:
        yield port


@pytest.fixture
def port(shared_port):
    """The shared server, idle again after the test."""
    yield shared_port
    shared_port.wait_idle()


@pytest.fixture
def http(port):
    with httpx.Client(base_url=port.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(port):
    """The official client."""
    with openai.OpenAI(base_url=port.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def other(port):
    """The same server with other settings: a function that asks it once."""

    def ask(method, path, *, limits=None, key="", hosts=(), log_all=False, **sent):
        more = {"key": key, "limits": limits, "hosts": hosts, "log_all": log_all}
        app = make_app(port.server, name=NAME, template="", **more)
        return ask_app(app, method, path, **sent)

    return ask
