"""A step at a short text accesses what the text requires, whatever the cache's limit."""

import pytest
from tiny import write_model

from research import cache_cost


@pytest.mark.wide
def test_a_step_accesses_what_the_text_requires(tmp_path, capsys, monkeypatch):
    write_model(tmp_path)
    rows, measure = [], cache_cost.measure
    monkeypatch.setattr(cache_cost, "measure", lambda *a: rows.extend(measure(*a)) or rows)
    flags = [f"--model={tmp_path}", f"--drafter={tmp_path}/heads", "--prompt=abc"]
    assert cache_cost.main(flags) == 0
    small, large, preallocated = (row["bytes"] for row in rows)
    # The model is so tiny that the longer list of output tokens shows; slots would show more.
    assert large < 1.3 * small
    assert preallocated > 2 * small  # the measure sees the difference
    assert "4096, preallocated" in capsys.readouterr().out
