"""ROUGE and exact match."""

import sys

import pytest

from medusa_jax.evaluate import scores


@pytest.mark.parametrize(
    "text, number",
    [
        ("He pays 400.\n#### 1,000", 1000.0),
        ("#### 72 (not 73)", 72.0),
        ("so it is $1,234.50.", 1234.5),
        ("from 3 to -2 degrees", -2.0),
        ("2 #### none", None),
        ("none at all", None),
    ],
)
def test_the_number_of_an_answer(text, number):
    assert scores.final_number(text) == number


def test_exact_match():
    assert scores.exact_match("it is 72 dollars.", ["x = <<1+1=2>>2\n#### 72"]) == 1
    assert scores.exact_match("72 or 73", ["#### 72"]) == 0
    assert scores.exact_match("no number", ["none #### no"]) == 0


@pytest.mark.parametrize(
    "turns, references, kind",
    [
        (["a"], [["x", "#### 3"]], "exact_match"),
        (["a"], [["3"]], "rouge"),
        (["a"], [], ""),
        (["a"], [[]], ""),
        (["a", "b"], [["x"], ["y"]], ""),
    ],
)
def test_what_a_question_is_scored_by(turns, references, kind):
    assert scores.kind_of({"turns": turns, "references": references}) == kind


def test_rouge_by_hand():
    # 3 of 4 words of the answer, 3 of the reference's 6; pairs: 1 of 3 and 1 of 5.
    found = scores.score("rouge", "the cat runs home", ["the cat has a home today"])
    assert found["rouge1"] == pytest.approx(100 * 2 * 3 / (4 + 6))
    assert found["rouge2"] == pytest.approx(100 * 2 * 1 / (3 + 5))
    assert found["rougeL"] == pytest.approx(100 * 2 * 3 / (4 + 6))
    assert scores.score("rouge", "cats", ["dog", "cat"])["rouge1"] == pytest.approx(100)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    assert not scores.has_rouge()
