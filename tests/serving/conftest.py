"""One server for all tests of the port, so that its programs are compiled once."""

import pytest
from served import load_model, port_of, write_chat_model


@pytest.fixture(scope="session")
def shared_port(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    write_chat_model(path)
    with port_of(load_model(path)) as port:
        yield port


@pytest.fixture
def port(shared_port):
    """The shared server, idle again when a test is over."""
    yield shared_port
    shared_port.wait_idle()
