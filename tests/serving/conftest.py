"""One server for all tests of the port, so that its programs are compiled once."""

import httpx2 as httpx
import openai
import pytest
import turns
from served import NAME, ask_app, port_of

from medusa_jax.serving import programs
from medusa_jax.serving.http import make_app

programs.SETTLE_SECONDS = 0.0


@pytest.fixture(scope="session")
def shared_port(tmp_path_factory):
    with port_of(tmp_path_factory.mktemp("served")) as port:
        yield port


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """What a scheduler whose turns are taken by hand has, in float64."""
    return turns.load_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def port(shared_port):
    """The shared server, idle again after the test."""
    yield shared_port
    shared_port.wait_idle()


@pytest.fixture
def http(port):
    with httpx.Client(base_url=port.url, timeout=60, verify=False) as client:
        yield client


@pytest.fixture
def client(port):
    """The official client, without certificates, which take 50 ms to read."""
    own = {"http_client": openai.DefaultHttpxClient(verify=False)}
    form = {"base_url": port.url + "/v1", "api_key": "any", "max_retries": 0}
    with openai.OpenAI(**form, **own) as client:
        yield client


@pytest.fixture
def other(port):
    """The same server with other settings: a function that asks it once."""

    def ask(method, path, *, limits=None, key="", hosts=(), log_all=False, **sent):
        more = {"key": key, "limits": limits, "hosts": hosts, "log_all": log_all}
        app = make_app(port.server, name=NAME, template="", **more)
        return ask_app(app, method, path, **sent)

    return ask
