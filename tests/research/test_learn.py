"""`research learn` on a tiny model: heads learn its answers."""

import pytest
from cases import wide
from files import write_lines
from tiny import PRINTABLE, TEMPLATE, set_template, write_model

import medusa_jax
from medusa_jax.learning import adapter
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
    for name, value in {"HELD_OUT": 2, "CHATS": 1, "MOST_PROMPT": 96, "NEW": 16}.items():
        monkeypatch.setattr(learn, name, value)
    monkeypatch.setattr(adapter, "RATE", 0.03)
    model, heads, ask = (
        tmp_path / "model",
        tmp_path / "model" / "heads",
        tmp_path / "ask.jsonl",
    )
    write_model(model, characters=PRINTABLE, max_position=256)
    set_template(model, TEMPLATE)
    (heads / "tree.json").write_text("[[0], [1], [2], [0, 0]]")
    write_lines(ask, [{"question_id": 1, "category": "qa", "turns": ["hi"]}])
    flags = [
        f"--model={model}", f"--drafter={heads}", f"--questions={ask}", "--shifts=tomatoes",
        "--points=1,4", f"--out={tmp_path}",
    ]  # fmt: skip
    assert learn.main(flags) == 0
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in table] == [5] * 3 and "±" in table[2][4]
    loaded = medusa_jax.load(str(model), str(heads))
    asked = learn.Flags(shifts=("tomatoes",), questions="", out=str(tmp_path))
    seen = learn.answers(asked, loaded)["tomatoes"][:4]
    [after] = learn.learn(loaded, seen * 5, [20])
    steps = [
        learn.replayed(loaded, params, seen, loaded.tree)[:, 1].sum()
        for params in (loaded.variables["heads"], after)
    ]
    assert steps[0] > 1.2 * steps[1]
    assert learn.main([*flags, "--shifts=birds"]) == 2
    assert "--shifts is one of python" in capsys.readouterr().err
