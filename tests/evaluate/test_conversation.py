"""What a model reads of a question: its own answers, templates, truncation."""

import pytest
from tiny import write_model

import medusa_jax
from medusa_jax import UserError
from medusa_jax.evaluate.questions import asked
from medusa_jax.interop.answers import encode_conversation
from medusa_jax.interop.chat import PLAIN
from research.asking import find_template, turn_prompt


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
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "x"},
    ]
    whole, counted = encode_conversation(model.tokenizer, messages, "vicuna")
    assert ids == whole[: len(ids)] and counted[len(ids) - 1 : len(ids) + 1] == [0, 1]
    assert read(model, talk, [], PLAIN, 999) == ("the cat", False)
    assert read(model, talk, [" an answer\n"], PLAIN, 999) == (
        "the cat\n\nan answer\n\na b",
        False,
    )


def test_auto_is_the_tokenizer_s_own_template(model, monkeypatch):
    assert find_template(model, "auto") == PLAIN
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ messages }}")
    assert find_template(model, "auto") == ""
    assert find_template(model, "vicuna") == "vicuna"


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


def test_a_conversation_is_asked_up_to_its_last_question(model):
    said = [
        ("user", "the cat"),
        ("assistant", "an answer"),
        ("user", "a b"),
        ("assistant", "x"),
    ]
    messages = [{"role": role, "content": text} for role, text in said]
    ids = asked(model, {"messages": messages}, "vicuna")
    talk = question("the cat", "a b")
    assert ids == turn_prompt(model, talk, ["an answer"], "vicuna", 999)[0]
    assert asked(model, {"messages": messages[:3]}, "vicuna") == ids
    assert asked(model, {"prompt": "a b"}, "vicuna") == "a b"
    first = turn_prompt(model, talk, [], "vicuna", 999)[0]
    assert asked(model, {"turns": ["the cat", "a b"]}, "vicuna") == first
    assert asked(model, {"turns": ["the cat", "a b"]}) == "the cat"  # without a template
    with pytest.raises(UserError, match="without a user turn"):
        asked(model, {"messages": messages[1:2]}, "vicuna")
