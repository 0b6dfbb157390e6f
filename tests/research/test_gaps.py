"""The times between the pieces of an answer, of a server that learns and of one that does not."""

from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np

from research import gaps


def test_the_time_to_the_first_piece_is_no_gap(monkeypatch, tmp_path, capsys):
    model = Mock(encode=lambda text: list(range(len(text))))
    learner = Mock(facts={"steps": 7})
    times = {False: [0.9, 1.0, 1.02, 1.06], True: [0.5, 0.6, 0.9]}
    servers = []

    def served(*given):
        servers.append(given[-1])
        return nullcontext((Mock(), "http://127.0.0.1:1"))

    monkeypatch.setattr(gaps, "use_compilation_cache", Mock())
    monkeypatch.setattr(gaps, "ladder_of", Mock())
    monkeypatch.setattr(gaps, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(gaps, "Learner", lambda *_: learner)
    monkeypatch.setattr(gaps, "served", served)
    clock = SimpleNamespace(monotonic=count(step=0.3).__next__, sleep=Mock())
    monkeypatch.setattr(gaps, "time", clock)
    monkeypatch.setattr(
        gaps, "record_prompts", lambda *_: ([], ["x" * 5, "y" * 999, "z"], [])
    )
    monkeypatch.setattr(gaps, "read_prompts", Mock())
    asked = []

    def pieces(_, call):
        asked.append(len(call[0]))
        return np.array(times[servers[-1] is not None])

    monkeypatch.setattr(gaps, "pieces", pieces)
    assert gaps.main(["--prompts", "q.jsonl", "--seconds", "1"]) == 0
    assert servers == [None, learner]
    assert asked == [5, 1, 5, 1] * 2  # the long one is left out
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().err.splitlines()[-2:]]
    plain, learns = [[cell.strip() for cell in row] for row in rows]
    assert plain == ["does not", "4", "900 ms", "40 ms", "100 ms", "100 ms", ""]
    assert learns == ["learns", "4", "500 ms", "200 ms", "300 ms", "300 ms", "7"]
