"""Question files as they are published."""

import json

import pytest

from medusa_jax import UserError
from medusa_jax.evaluate.questions import prompt_of, read_prompts, spread
from research.question_files import read_questions

TALK = {"question_id": 81, "category": "writing", "turns": ["one", "two"],
        "reference": ["a", ["b", "c"]]}  # fmt: skip
# A record as published -> what is asked, and in what category.
PUBLISHED = {
    "spec_bench": (TALK, ["one", "two"], "writing"),
    "alpaca_eval": (
        {"instruction": "say hi", "output": "hi", "generator": "g", "dataset": "helpful_base"},
        ["say hi"], "helpful_base",
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "t",
         "canonical_solution": "    return 1\n"},
        ["def f():\n"], "humaneval",
    ),
    "gsm8k": (
        {"question": "1 + 1?", "answer": "two\n#### 2"}, ["1 + 1?"], "gsm8k",
    ),
    "xsum": (
        {"document": "long", "summary": "short", "id": "7"}, ["long"], "xsum"
    ),
    "cnn_dm": (
        {"article": "long", "highlights": "short", "id": "7"}, ["long"], "cnn_dm",
    ),
    "own": ({"prompt": "x", "file": "a.py"}, ["x"], "a.py"),
}  # fmt: skip


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms(name, tmp_path):
    record, turns, category = PUBLISHED[name]
    (found,) = read_questions(write(tmp_path / "q.jsonl", [record]))
    assert (found["turns"], found["category"]) == (turns, category)
    assert found["question_id"] == record.get("question_id", 0)
    article = name in ("xsum", "cnn_dm")
    asked = "Article: longSummary: " if article else turns[0]
    assert prompt_of(found) == asked
    assert (found["frame"] is None) == (not article and name != "own")


def test_ids_and_limits_of_our_own_files(tmp_path):
    asked = [{"prompt_ids": [3, 4]}, {"prompt": "a"}, {"prompt_ids": []}]
    path = write(tmp_path / "q.jsonl", asked)
    assert [prompt_of(q) for q in read_questions(path)] == [[3, 4], "a", []]
    assert len(read_prompts(path, 1)) == 1 and len(read_prompts(path)) == 3


@pytest.mark.parametrize(
    "record, sentence",
    [
        ({"prompt": 5}, r"record 0 should ask text, not \[5\]"),
        ({"messages": 5}, "record 0 has no list of turns as messages"),
        ({"turns": [5]}, r"record 0 should ask text, not \[5\]"),
        ({"messages": []}, "holds no conversation with a turn"),
        ({"x": 5}, "every line of .* needs 'prompt' or 'prompt_ids'"),
    ],
)
def test_prompts_that_ask_nothing(record, sentence, tmp_path):
    path = write(tmp_path / "q.jsonl", [record])
    with pytest.raises(UserError, match=sentence):
        read_prompts(path, messages=True)


def test_a_limit_takes_from_all_categories():
    questions = [{"category": c, "n": n} for c in "abc" for n in range(4)]
    questions += [{"category": "d", "n": 0}]
    taken = [(q["category"], q["n"]) for q in spread(questions, 7)]
    assert taken == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1), ("d", 0)]
    assert spread(questions, 0) == questions


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('{"text": "x"}\n', "is in no known form; by fields of a record: all: turns;"),
        ('{"turns": ["a"]}\n{"x": 1}\n', "record 1 lacks turns"),
        ('{"turns": [5]}', r"record 0 should ask text, not \[5\]"),
        ('{"turns": "a"}', "record 0 should ask text, not 'a'"),
        ('{"turns": []}', "record 0 asks nothing"),
        ('{"instruction": 5}', "record 0 has other values in instruction"),
        ('{"prompt": null}', r"record 0 should ask text, not \[None\]"),
        ('{"prompt_ids": ["a"]}', "record 0: 'prompt_ids' should be a list of token ids"),
        ("[1]", "every record has to be a JSON object"),
        ("", "has no samples"),
        ("{", "record 0: broken JSON"),
    ],
)
def test_bad_files(text, sentence, tmp_path):
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_questions(str(tmp_path / "q.jsonl"))
