"""`serve`: what it refuses before it serves; a whole process from start to SIGTERM."""

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
import threading

import children
import pytest
from tiny_model import write_model

from medusa_jax.commands import serve_run
from medusa_jax.commands.serve import main
from medusa_jax.commands.serve_run import known_hosts, most_connections, read_key
from medusa_jax.errors import UserError


@pytest.fixture
def refused(capsys):
    """The one line that a bad call prints."""

    def run(*flags):
        capsys.readouterr()
        assert main([*map(str, flags)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
        return err

    return run


def test_what_is_refused(refused, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen" in refused("--port", taken.getsockname()[1])
    assert "cannot listen" in refused("--port", 10**6)
    assert "--slots must be more than 0" in refused("--slots", 0)
    assert "--timeout must be more than 0, not nan" in refused("--timeout", "nan")
    assert "cannot read --api_key_file" in refused("--api_key_file", tmp_path / "none")
    (tmp_path / "empty").write_text(" \n")
    assert "holds no key" in refused("--api_key_file", tmp_path / "empty")
    assert "there are: vicuna" in refused(
        "--chat", "vicnua", "--port", 0, "--drafter", "none"
    )


def test_a_tree_that_copies_needs_no_heads(refused, monkeypatch):
    def load(flags, **more):
        raise UserError(f"asked for {more['tree']}")

    monkeypatch.setattr(serve_run, "load_model", load)
    flags = ("--port", 0, "--drafter", "none", "--tree", "copy:4")
    assert "asked for copy:4" in refused(*flags)


def test_a_missing_package_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "needs starlette: pip install 'medusa-jax[serve]'" in refused("--port", 0)


def test_the_key(monkeypatch, tmp_path):
    monkeypatch.delenv("MEDUSA_API_KEY", raising=False)
    assert read_key(None) == ""
    monkeypatch.setenv("MEDUSA_API_KEY", "open sesame")
    assert read_key(None) == "open sesame"
    (tmp_path / "key").write_text("of a file\n")
    assert read_key(str(tmp_path / "key")) == "of a file"


def test_hosts_without_a_key():
    assert known_hosts("127.0.0.2", "my.machine", "")[-2:] == ["127.0.0.2", "my.machine"]
    assert "localhost" in known_hosts("::1", "::1", "")
    assert known_hosts("127.0.0.1", "localhost", "key") == []
    assert known_hosts("0.0.0.0", "0.0.0.0", "") == known_hosts("::", "::", "") == []


def test_connections_leave_files_for_the_rest():
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        assert most_connections() == 308
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


@pytest.mark.parametrize("key", ["clé", "a\tb", " ", "\udce9"])
def test_a_key_that_no_client_can_send(monkeypatch, key):
    monkeypatch.setenv("MEDUSA_API_KEY", key)
    with pytest.raises(UserError, match="the variable MEDUSA_API_KEY"):
        read_key(None)


@pytest.fixture
def process(tmp_path):
    """`serve` with two slots on a port of its own."""
    write_model(tmp_path)
    command = [sys.executable, "-m", "medusa_jax", "serve", "--port", "0", "--slots", "2"]
    command += ["--model", str(tmp_path), "--drafter", str(tmp_path / "heads")]
    command += ["--tree", "chain:2", "--warm_up", "0"]
    environment = children.environment()
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment
    ) as started:
        yield started
        started.kill()


@pytest.mark.slow
def test_kill_under_load(process):
    """Eight answers are running or waiting: new calls find nobody, these end whole, and then the
    process does, with 0."""
    import httpx2 as httpx

    lines = iter(process.stderr.readline, "")
    url = next(m[1] for line in lines if (m := re.search(r"(http://\S+)/v1", line)))
    started, answers = threading.Semaphore(0), []

    def ask():
        sent = {"prompt": "in", "max_tokens": 90, "temperature": 0, "stream": True}
        given = {"json": sent, "timeout": 300}
        with httpx.stream("POST", url + "/v1/completions", **given) as answer:
            started.release()
            answers.append(answer.read().decode())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        started.acquire()
    process.terminate()
    with pytest.raises(httpx.ConnectError):
        while True:  # one that comes while the listener closes may be reset
            with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                httpx.get(url + "/health", timeout=60)
    assert process.poll() is None and len(answers) < 8  # it is not gone, it finishes
    for thread in threads:
        thread.join()
    assert process.wait(120) == 0
    assert len(answers) == 8
    texts = set()
    for answer in answers:
        *events, last = [
            line[6:] for line in answer.splitlines() if line.startswith("data: ")
        ]
        assert last == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        assert choices[-1]["finish_reason"] in ("stop", "length")
        texts.add("".join(choice["text"] for choice in choices))
    assert len(texts) == 1 and texts != {""}
