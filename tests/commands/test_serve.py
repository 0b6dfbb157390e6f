"""`serve`: what it refuses before it serves; a whole process from start to SIGTERM."""

import contextlib
import re
import subprocess
import sys
import threading

import children
import pytest
from served import events_of, texts_of
from tiny import write_model

from medusa_jax.api.bundles import name_of
from medusa_jax.commands.serve_run import known_hosts, read_key
from medusa_jax.errors import UserError


def test_the_key(monkeypatch, tmp_path):
    monkeypatch.delenv("MEDUSA_API_KEY", raising=False)
    assert read_key(None) == ""
    monkeypatch.setenv("MEDUSA_API_KEY", "open sesame")
    assert read_key(None) == "open sesame"
    (tmp_path / "key").write_text("of a file\n")
    assert read_key(str(tmp_path / "key")) == "of a file"
    for key in ("clé", "a\nb", "a\x7f", "\u200ba"):  # httpx encodes headers in ASCII
        (tmp_path / "key").write_text(key, encoding="utf-8")
        with pytest.raises(UserError, match="key holds a key with characters outside"):
            read_key(str(tmp_path / "key"))


def test_hosts_without_a_key():
    assert known_hosts("127.0.0.2", "my.machine", "")[-2:] == ["127.0.0.2", "my.machine"]
    assert "localhost" in known_hosts("::1", "::1", "")
    assert known_hosts("127.0.0.1", "localhost", "key") == []
    assert known_hosts("0.0.0.0", "0.0.0.0", "") == known_hosts("::", "::", "") == []


def test_clients_do_not_learn_where_a_model_is(tmp_path, monkeypatch):
    folder = tmp_path / "secret" / "llama"
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(b"")
    monkeypatch.chdir(folder)
    for path in (str(folder), f"{folder}/", ".", "../llama"):
        assert name_of(path) == "llama"
    for path in (str(folder / "a.gguf"), "a.gguf"):
        assert name_of(path) == "a.gguf"
    assert name_of(None) == "demo"
    for name in ("smollm2", "owner/name@main"):
        assert name_of(name) == name


@pytest.fixture
def process(tmp_path):
    """`serve` with two slots on a free port."""
    write_model(tmp_path)
    flags = f"--port 0 --slots 2 --warm_up 0 --model {tmp_path}"
    flags += f" --drafter {tmp_path}/heads --tree chain:2"
    command = [sys.executable, "-m", "medusa_jax", "serve", *flags.split()]
    options = {"stderr": subprocess.PIPE, "text": True, "env": children.environment()}
    with subprocess.Popen(command, **options) as started:
        yield started
        started.kill()


@pytest.mark.slow
def test_kill_under_load(process):
    """Eight answers are running or waiting: new calls are refused, these end whole, and then the
    process does, with 0."""
    import httpx2 as httpx

    lines = iter(process.stderr.readline, "")
    opened = next(line for line in lines if "the page is there" in line)
    ready = next(m for line in lines if (m := re.search(r"ready .* (http://\S+)/v1", line)))
    url = ready[1]
    assert url in opened and httpx.get(url + "/health").status_code == 200
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
    streams = [events_of(answer) for answer in answers]
    assert all(s[-1]["choices"][0]["finish_reason"] in ("stop", "length") for s in streams)
    [text] = {texts_of(stream)[0] for stream in streams}
    assert text
