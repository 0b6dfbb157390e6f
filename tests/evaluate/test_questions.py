"""What a model reads of a question: published files, its own answers, templates, truncation."""

import json

import pytest
from files import write_lines
from refusals import refused
from tiny import write_model

import medusa_jax
from medusa_jax import Options, UserError
from medusa_jax.distill.seeds import read_seeds
from medusa_jax.evaluate.prompt_files import (
    read_prompts,
    record_prompt,
    record_prompts,
    spread,
    with_prompt,
)
from medusa_jax.evaluate.question_files import read_questions
from medusa_jax.evaluate.turns import turn_prompt
from medusa_jax.text.answers import encode_conversation
from medusa_jax.text.chat import PLAIN, encode_prompt

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
    "gsm8k": ({"question": "1 + 1?", "answer": "two\n#### 2"}, ["1 + 1?"], "gsm8k"),
    "xsum": ({"document": "long", "summary": "short", "id": "7"}, ["long"], "xsum"),
    "cnn_dm": ({"article": "long", "highlights": "short", "id": "7"}, ["long"], "cnn_dm"),
    "dolly": ({"instruction": "i", "context": "c", "response": "r", "category": "qa"}, ["i\n\nc"], "qa"),
    "talk": (
        {"system": "s", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"},
                                          {"from": "human", "value": "z"}]},
        ["x", "z"], "all",
    ),
    "own": ({"prompt": "x", "file": "a.py"}, ["x"], "a.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms(name, tmp_path):
    record, turns, category = PUBLISHED[name]
    (found,) = read_questions(str(write_lines(tmp_path / "q.jsonl", [record])))
    assert (found["turns"], found["category"]) == (turns, category)
    assert found["question_id"] == record.get("question_id", 0)
    assert found["system"] == record.get("system", "")
    article = name in ("xsum", "cnn_dm")
    asked = "Article: longSummary: " if article else turns[0]
    assert found["prompt"] == asked
    assert (found["frame"] is None) == (not article and name != "own")


def test_a_limit_takes_from_all_categories():
    questions = [{"category": c, "n": n} for c in "abc" for n in range(4)]
    questions += [{"category": "d", "n": 0}]
    taken = [(q["category"], q["n"]) for q in spread(questions, 7)]
    assert taken == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1), ("d", 0)]
    assert spread(questions, 0) == questions


def read_as_seeds(path):
    return read_seeds(path, "train", 0)


@pytest.mark.parametrize("read", [read_prompts, read_questions, read_as_seeds])
@pytest.mark.parametrize(
    "text, sentence",
    [
        ('{"messages": 5}', r"has nothing to ask \(1 x no user turn, first in line 1"),
        ('{"messages": []}', "no user turn"),
        ('{"x": 5}', "nothing to ask"),
        ('{"turns": [5]}', r"turns that are not texts: \[5\]"),
        ('{"turns": [" "]}', "1 x nothing to ask"),
        ('{"prompt": ""}', "1 x nothing to ask"),
        ('{"prompt_ids": [], "prompt": ""}', "1 x nothing to ask"),
        ('{"instruction": 5}', "a turn of 'user' without text"),
        *(
            (
                json.dumps({"prompt_ids": ids, "prompt": "a"}),
                "1 x prompt_ids that are not token ids",
            )
            for ids in (["a"], [-1], [True], "ab")
        ),
        ('{"prompt": "\\ud800"}', "1 x an unpaired surrogate"),
        ("[1]", "nothing to ask"),
        ("", "has no samples"),
        ("{", "broken JSON, first in line 1"),
    ],
)
def test_bad_files(read, text, sentence, tmp_path):
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read(str(tmp_path / "q.jsonl"))


def test_all_records_of_a_question_file_count(tmp_path):
    """Tables are of the whole file; the other readers skip a record."""
    file = str(write_lines(tmp_path / "q.jsonl", [{"turns": ["a"]}, {"x": 1}]))
    with refused("q.jsonl: 1 x nothing to ask, first in line 2"):
        read_questions(file)
    assert len(read_prompts(file)) == len(read_as_seeds(file)) == 1


SAID = [*zip(["user", "assistant"] * 2, ["the cat", "an answer", "a b", "x"])]
SYSTEM = {"role": "system", "content": "in"}
MESSAGES = [{"role": role, "content": text} for role, text in SAID]


def test_training_data_asks_its_last_question_or_its_beginning(tmp_path, capsys):
    talk = [{"conversations": MESSAGES}, {"instruction": "the cat", "output": "an answer"}]
    talk.append(MESSAGES[:3])
    found = read_prompts(str(write_lines(tmp_path / "a.jsonl", talk)))
    assert [r["messages"] for r in found] == [MESSAGES, MESSAGES[:2], MESSAGES[:3]]
    with_chat = {"prompt": "the cat", "completion": "an answer"}
    turns = [{"from": name, "value": text} for name, text in SAID]
    talk = [{"messages": turns}, with_chat, {"text": "x" * 500}, {"prompt": MESSAGES[:1]}]
    talk += [
        {"prompt": "in", "messages": None},
        {"messages": [*MESSAGES, *MESSAGES[:1] * 2]},
    ]
    file = write_lines(tmp_path / "mixed.jsonl", [*talk, {"x": 1}])
    file.write_text("{\n" + file.read_text())
    found = read_prompts(str(file))
    assert [r.get("messages", r.get("prompt")) for r in found] == [
        MESSAGES, MESSAGES[:2], "x" * 200, MESSAGES[:1], "in", [*MESSAGES, MESSAGES[0]],
    ]  # fmt: skip
    said = "2 of 8 records skipped (1 x broken JSON, first in line 1; 1 x nothing to ask, first in line 8)"
    assert said in capsys.readouterr().err
    assert len(read_prompts(str(file), 3)) == 3  # those that ask something
    (tmp_path / "a.txt").write_text("x" * 500)
    assert [len(record["prompt"]) for record in read_prompts(str(tmp_path / "a.txt"))] == [
        200
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path, max_position=256)
    return medusa_jax.load(str(path), "none", dtype="float32")


def question(*turns, frame=None):
    return {"question_id": 5, "turns": list(turns), "frame": frame}


def read(model, *args):
    ids, cut = turn_prompt(model, *args)
    return model.tokenizer.decode(ids), cut


def test_the_second_turn_comes_after_the_model_s_own_answer(model):
    talk = question("the cat", "a b")
    ids, _ = turn_prompt(model, talk, [" an answer\n"], "vicuna", 999)
    whole, counted = encode_conversation(model.tokenizer, MESSAGES, "vicuna")
    assert ids == whole[: len(ids)] and counted[len(ids) - 1 : len(ids) + 1] == [0, 1]
    assert read(model, talk, [], PLAIN, 999) == ("the cat", False)
    ids, _ = turn_prompt(model, talk | {"system": "in"}, [], "vicuna", 999)
    assert ids == encode_prompt(model.tokenizer, [SYSTEM, MESSAGES[0]], "vicuna")
    whole = "the cat\n\nan answer\n\na b"
    assert read(model, talk, [" an answer\n"], PLAIN, 999) == (whole, False)


def test_an_article_is_cut_at_its_end_and_keeps_its_frame(model):
    asked = question("a cat in the " * 20, frame=("in. ", "\nthe"))
    whole, _ = turn_prompt(model, asked, [], "vicuna", 999)
    ids, cut = turn_prompt(model, asked, [], "vicuna", 30)
    text = model.tokenizer.decode(ids)
    assert cut and 28 <= len(ids) <= 30
    assert text.startswith("in. a cat in") and text.endswith("\nthe")
    # No chat template, whatever is asked for.
    assert model.tokenizer.decode(whole) == "in. " + "a cat in the " * 20 + "\nthe"


def test_other_turns_keep_both_ends(model):
    """The longest turn is the one that is cut, in a conversation too."""
    passage = "begin " + "abc " * 60 + "end"
    text, cut = read(model, question(passage), [], PLAIN, 30)
    assert cut and text.startswith("begin") and text.endswith("end")
    text, cut = read(model, question(passage, "then"), ["well"], PLAIN, 40)
    assert cut and text.startswith("begin") and text.endswith("end\n\nwell\n\nthen")
    with pytest.raises(UserError, match="question 5: a prompt of at most 3 tokens"):
        turn_prompt(model, question("ab", "the cat in the"), ["x" * 9], PLAIN, 3)


def test_conversations_that_a_template_refuses_are_left_out(model, monkeypatch, capsys):
    template = "{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}a b"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    short, long = {"messages": MESSAGES[:1]}, {"messages": MESSAGES}
    records, prompts, _ = record_prompts(model, [long, short, long], Options())
    assert records == [short] and prompts == [record_prompt(model, short)]
    assert "2 of 3 prompts are left out" in capsys.readouterr().err
    with refused("refuses the conversation: one turn"):
        record_prompts(model, [long], Options())


def test_a_conversation_is_asked_up_to_its_last_question(model):
    ids = record_prompt(model, {"messages": MESSAGES}, "vicuna")
    talk = question("the cat", "a b")
    assert ids == turn_prompt(model, talk, ["an answer"], "vicuna", 999)[0]
    assert record_prompt(model, {"messages": MESSAGES[:3]}, "vicuna") == ids
    assert record_prompt(model, {"prompt": "a b"}, "vicuna") == "a b"
    pair = {"prompt": "the cat", "messages": MESSAGES[:2]}
    assert record_prompt(model, pair) == "the cat"
    first = turn_prompt(model, talk, [], "vicuna", 999)[0]
    several = with_prompt(0, {"turns": ["the cat", "a b"]})
    assert record_prompt(model, several, "vicuna") == first
    assert record_prompt(model, several) == "the cat"  # without a template
