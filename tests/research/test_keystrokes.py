"""What is asked after each keystroke, and the table of what the answers took."""

import threading
from contextlib import nullcontext
from http.server import ThreadingHTTPServer
from unittest.mock import Mock

from editor import JsonHandler

from research import keystrokes


def test_requests_grow_by_a_character_and_the_first_of_a_place_is_not_counted(
    monkeypatch, tmp_path, capsys
):
    asked = []

    class Infill(JsonHandler):
        def answer(self, body):
            asked.append(body)
            return {"content": "x", "tokens_predicted": 3, "timings": {"prompt_n": 2}}

    http = ThreadingHTTPServer(("127.0.0.1", 0), Infill)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_port}"
    server = Mock()
    for name in ("use_compilation_cache", "load_model", "gguf_file", "ladder_of"):
        monkeypatch.setattr(keystrokes, name, Mock())
    peer = Mock(listening_address=url)
    monkeypatch.setattr(keystrokes.xllamacpp, "server_of", lambda *given: peer)
    monkeypatch.setattr(keystrokes, "served", lambda *given: nullcontext((server, url)))
    file = tmp_path / "a.txt"
    file.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 3000))))
    assert keystrokes.main(["--files", str(file), "--places", "2", "--keys", "3"]) == 0
    http.shutdown()
    assert len(asked) == 2 * 3 * 4  # places, servers, requests
    for at in range(0, len(asked), 4):
        first, *others = asked[at : at + 4]
        before, after = first["input_prefix"], first["input_suffix"]
        typed = [one["input_prefix"].removeprefix(before) for one in others]
        assert typed == [typed[2][:1], typed[2][:2], typed[2]] and len(typed[2]) == 3
        assert ord(after[0]) == ord(typed[2][2]) + 1 == ord(before[-1]) + 4
    rows = [line for line in capsys.readouterr().err.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[1:]] == [
        "llama.cpp",
        "plain",
        "drafts",
    ]
    assert all("| 3.0" in row and "| 2.0" in row and "| 6 of 6" in row for row in rows[1:])
