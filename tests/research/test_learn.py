"""`research learn` on a tiny model: heads learn its answers, and an addition begins as nothing."""

import json

import jax
import numpy as np
import pytest
from cases import wide
from files import write_lines
from tiny import PRINTABLE, TEMPLATE, set_template, write_model

from research import learn
from research.learn_prompts import questions


@pytest.mark.parametrize("shift", [*wide("python"), "json", "tomatoes"])
def test_prompts_differ_and_have_no_gaps(shift):
    asked = questions(shift, 40)
    assert len(set(asked)) == 40
    assert not any(
        gap in text for gap in ("{place}", "{record}", "{source}") for text in asked
    )


@pytest.mark.wide
def test_heads_learn_the_models_answers(tmp_path, monkeypatch, capsys):
    sizes = {"HELD_OUT": 2, "CHATS": 1, "MOST_PROMPT": 96, "NEW": 16, "LR": 0.02}
    for name, value in sizes.items():
        monkeypatch.setattr(learn, name, value)
    model, heads = tmp_path / "model", tmp_path / "model" / "heads"
    write_model(model, characters=PRINTABLE, max_position=256)
    set_template(model, TEMPLATE)
    about = json.loads((heads / "heads.json").read_text())
    about["recipe"] = {"config": {"train": {"label_weight": 1.0, "loss_chunk": 16}}}
    (heads / "heads.json").write_text(json.dumps(about))
    (heads / "tree.json").write_text(json.dumps([[i] for i in range(7)]))
    write_lines(
        tmp_path / "ask.jsonl", [{"question_id": 1, "category": "qa", "turns": ["hi"]}]
    )
    tokens, lengths = np.arange(20, dtype=np.uint16), np.array([12, 8], np.uint16)
    sample = tmp_path / "sample.npz"
    np.savez_compressed(sample, tokens=tokens, counted=tokens > 3, lengths=lengths)
    rehearsed = learn.read_rows(str(sample))
    assert [(len(ids), sum(learned)) for ids, learned in rehearsed] == [(12, 8), (8, 8)]
    flags = [
        f"--model={model}", f"--drafter={heads}", f"--questions={tmp_path / 'ask.jsonl'}",
        "--shifts=tomatoes", "--points=1,4", "--steps=8", f"--rehearsal={sample}", f"--out={tmp_path}",
    ]  # fmt: skip
    assert learn.main(flags) == 0
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in table] == [5] * 3 and "±" in table[2][4]
    learner = learn.Learner(learn.Flags(model=str(model), drafter=str(heads), questions=""))
    texts = learn.answers(
        learn.Flags(shifts="tomatoes", questions="", out=str(tmp_path)), learner.model
    )
    seen = texts["tomatoes"][:4]
    [after] = learner.learn(seen, [], learn.Flags(questions="", points=(4,), steps=40))
    n_steps = [
        learner.replayed(params, seen)[:, 1].sum() for params in (learner.params, after)
    ]
    assert n_steps[0] > 1.2 * n_steps[1]
    [same] = learner.learn(seen, rehearsed, learn.Flags(questions="", points=(4,), steps=0))
    jax.tree.map(np.testing.assert_array_equal, same, learner.params)
    assert learn.main([*flags, "--shifts=birds"]) == 2
    assert "--shifts is one of python" in capsys.readouterr().err
