"""`replay` on a tiny model: accepted lengths equal decoding's, over both turns."""

import json

import numpy as np
import pytest
from files import write_lines
from tiny import write_model

import medusa_jax
from medusa_jax import Options
from medusa_jax.evaluate.tree_fit import GROWTH, rank_texts
from medusa_jax.tree.growth import order_by_steps
from research import replay

pytestmark = pytest.mark.usefixtures("x64")

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["the cat", "in the"]},
    {"question_id": 2, "category": "qa", "turns": ["abcab, a hat."]},
    {"question_id": 3, "category": "qa", "turns": ["in the hat"]},
]
NEW, NODES = 40, 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path, max_position=128)
    write_lines(path / "questions.jsonl", QUESTIONS)
    others = ({"prompt": text} for text in ("a hat", "the", "cat and"))
    write_lines(path / "other.jsonl", others)
    return path


def steps_of(result, n_heads):
    """Tokens and steps over the positions from which the deepest head still has its token."""
    ends = np.flatnonzero(np.array(result.draft_depths[1:]) == 0) + 1  # a bonus token each
    tokens = result.new_tokens - n_heads
    return tokens, 1 + int(np.searchsorted(ends, tokens))


@pytest.mark.wide
@pytest.mark.parametrize("temperature", [0.9, 0.0])
def test_lengths_are_those_of_decoding(directory, tmp_path, temperature, capsys):
    flags = [
        f"--model={directory}", f"--drafters={directory / 'heads'}", f"--nodes={NODES}",
        f"--questions={directory / 'questions.jsonl'}", f"--max_new_tokens={NEW}",
        "--dtype=float64", "--chat_template=plain", f"--out={tmp_path}",
        f"--fit={directory / 'other.jsonl'}", f"--temperature={temperature}",
    ]  # fmt: skip
    assert replay.main(flags) == 0
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip() for cell in table[0][:2]] == ["category", "turns"]
    rows = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in table[2:]}
    assert list(rows) == ["writing", "qa", "mt_bench", "overall"]
    assert [row[0] for row in rows.values()] == ["2", "2", "2", "4"]

    heads = str(directory / "heads")
    model = medusa_jax.load(str(directory), heads, dtype="float64", tree="none")
    options = Options(max_new_tokens=NEW, temperature=temperature)
    fitted = rank_texts(model, ["a hat", "the", "cat and"], options)
    tree = order_by_steps(fitted, GROWTH, copies=True).tree(NODES)
    assert tree.spares
    kept = json.loads((tmp_path / "texts.json").read_text())["texts"]
    prompts = [ids[:n] for ids, n in kept]
    # One at a time: rows of a batch decide together whether spares are used.
    results = [model.generate([one], options, [0], tree=tree)[0] for one in prompts]
    assert [x.token_ids for x in results] == [ids[n:] for ids, n in kept]
    of_answers = [steps_of(result, model.drafter.n_heads) for result in results]
    for category, own in {"writing": [0, 3], "qa": [1, 2], "overall": range(4)}.items():
        tokens, steps = (sum(of_answers[i][k] for i in own) for k in (0, 1))
        assert rows[category][2] == f"{tokens / steps:.2f}"
