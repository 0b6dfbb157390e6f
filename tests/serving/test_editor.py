"""An editor as a client: llama.vim in a real Vim, and its keystrokes replayed.

The directory of the plugin (github.com/ggml-org/llama.vim) is in the environment variable LLAMA_VIM.
"""

import os
import shutil
import time
from pathlib import Path

import pytest
from editor import TAB, Editor, recorded
from served import NAME, TREE, listening, load_model, until
from tiny import write_coder
from turns import Client, finish, scheduler_of

from medusa_jax.serving import Server
from medusa_jax.serving.http.infill import InfillReply, infill_call

# What llama.vim sent while 200 keys and more were pressed (`tests/support/editor.py`).
BODIES = recorded(Path(__file__).with_name("llama_vim.json"))
PLUGIN = os.environ.get("LLAMA_VIM", "")
CAN_RUN = bool(PLUGIN) and all(map(shutil.which, ("vim", "curl")))


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    path = tmp_path_factory.mktemp("coder")
    write_coder(path, max_position=8192)
    return load_model(path)


@pytest.mark.wide
def test_each_keystroke_replaces_the_last_request(coder):
    """It frees its row before the next step, and nearly all of the prompt is in the cache."""
    assert len(BODIES) >= 200
    scheduler, last, prompts, reused = scheduler_of(coder, {1: TREE}), None, 0, 0
    for number, body in enumerate(BODIES):
        call = infill_call(body, NAME, coder, 8191, 300)
        if last:
            last.handle.cancel()
        [request] = call.requests
        client = Client(scheduler, coder, request)
        for _ in range(2):
            scheduler.step()
            holding = [row.job for row in scheduler._jobs.rows if row.job]
            assert holding in ([], [client.job])
        if number % 10 == 0 or number + 1 == len(BODIES):
            finish(scheduler)
            assert client.ended
        last = client
        prompts, reused = prompts + len(client.job.prompt), reused + client.job.reused
    assert reused >= 0.9 * prompts


@pytest.mark.skipif(
    not CAN_RUN, reason="needs vim, curl and llama.vim's directory in LLAMA_VIM"
)
def test_llama_vim_types_waits_and_accepts(coder, tmp_path, monkeypatch):
    file, answers, true_whole = tmp_path / "add.py", [], InfillReply.whole

    def whole(reply):
        answers.append((reply.call.own["prompt"], true_whole(reply)))
        return answers[-1][1]

    monkeypatch.setattr(InfillReply, "whole", whole)
    file.write_text("def add(a, b):\n")
    server = Server(coder, slots=2, trees={2: TREE})
    with server, listening(server) as port:
        fields = {"endpoint_fim": f"{port.url}/infill", "n_predict": 8, "show_info": 0}
        editor = Editor(tmp_path, file, PLUGIN, **fields)
        until(lambda: b"def" in editor.screen)
        editor.type("o    ret", 0.1)
        asked = "def add(a, b):\n    ret<|fim_suffix|>"
        until(lambda: any(asked in text for text, _ in answers), 240)
        text = next(answer["content"] for text, answer in answers if asked in text)
        time.sleep(1)  # it is shown
        editor.type(TAB)
        time.sleep(1)
        assert editor.close() == 0
        port.wait_idle()
    written = file.read_text()
    assert text.strip() and written == f"def add(a, b):\n    ret{text.rstrip(chr(10))}\n"
