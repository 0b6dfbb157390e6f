"""bench questions on a tiny model: both turns, files that others read, figures that add up."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from files import read_lines, write_lines
from tiny import write_model
from tokenizers import Tokenizer, processors

from medusa_jax import Options, Tree
from medusa_jax.commands import bench_questions as bench
from medusa_jax.evaluate import answering, conversation, scores
from medusa_jax.evaluate.questions import MT_BENCH_TEMPERATURES
from medusa_jax.evaluate.race import figures

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["the cat", "in the"]},
    {"question_id": 82, "category": "math", "turns": ["a b", "c"], "reference": ["a", "b"]},
    {"question_id": 161, "category": "translation", "turns": ["abc"], "reference": ["the a"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["a."], "reference": ["#### 4"]},
    {"question_id": 241, "category": "summarization", "turns": ["a cat in the " * 20, "c"]},
]  # fmt: skip
MT_BENCH = [
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path, max_position=128)
    # As Llama's tokenizers are published: asked for ids, transformers puts the BOS in front.
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    write_lines(path / "question.jsonl", QUESTIONS)
    return path


@pytest.fixture(scope="module")
def out(directory, tmp_path_factory):
    """The files of one run, without the step timed in isolation."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "step_ratio", lambda *_: 2.0)
        assert bench.main(arguments(directory, out)) == 0
    return out


def arguments(directory, out, **flags):
    flags = {
        "model": directory, "drafters": directory / "heads", "trees": "chain:2",
        "questions": directory / "question.jsonl", "max_new_tokens": 16, "repeats": 1,
        "chat_template": "plain", "max_prompt_tokens": 60, "out": out,
    } | flags  # fmt: skip
    return [f"--{name}={value}" for name, value in flags.items()]


def spec_bench_speed(answers, baseline, tokenizer, task):
    """What `evaluation/speed.py` of Spec-Bench does with two answer files."""

    def of_task(line):
        if task == "mt_bench":
            return line["category"] in MT_BENCH
        return task in ("overall", line["category"])

    ours, lengths = [], []
    for line in filter(of_task, read_lines(answers)):
        choice = line["choices"][0]
        ours.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths.extend(choice["accept_lengths"])
    theirs = []
    for line in filter(of_task, read_lines(baseline)):
        choice = line["choices"][0]
        tokens = sum(len(tokenizer(turn).input_ids) - 1 for turn in choice["turns"])
        theirs.append(tokens / sum(choice["wall_time"]))
    return np.mean(ours) / np.mean(theirs), np.mean(lengths)


def test_spec_bench_s_own_script_gets_our_speedup(directory, out):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    rows = {
        row["category"]: row
        for row in json.loads((out / "results.json").read_text())["rows"]
    }
    files = (out / "medusa-3.jsonl", out / "medusa-3-vanilla.jsonl")
    for task in ("mt_bench", "translation", "summarization", "overall"):
        speedup, length = spec_bench_speed(*files, tokenizer, task)
        assert rows[task]["spec_bench_speedup"] == pytest.approx(speedup, rel=1e-9)
        assert rows[task]["mean_accepted_length"] == pytest.approx(length, rel=1e-9)


def test_rows_by_category_and_overall(out):
    facts = json.loads((out / "results.json").read_text())
    rows = {row["category"]: row for row in facts["rows"]}
    assert list(rows) == [*(q["category"] for q in QUESTIONS), "mt_bench", "overall"]
    assert (rows["mt_bench"]["questions"], rows["mt_bench"]["turns"]) == (2, 4)
    assert (rows["overall"]["questions"], rows["overall"]["turns"]) == (5, 8)
    assert (rows["overall"]["cut"], rows["writing"]["cut"]) == (1, 0)
    assert rows["overall"]["divergences"] == 0
    assert rows["overall"]["tokens"] == sum(
        rows[q["category"]]["tokens"] for q in QUESTIONS
    )
    for row in rows.values():
        assert abs(row["difference"]) < 1e-9
        ideal = row["mean_accepted_length"] / 2.0  # the step as timed apart in this test
        assert row["difference_apart"] == pytest.approx(row["speedup"] / ideal - 1)
    assert facts["versions"]["jax"] and facts["device"].startswith("cpu")
    assert len(facts["sha256"]) == 64 and facts["options"]["max_new_tokens"] == 16
    match = rows["math_reasoning"]["scores"]["exact_match"]
    assert match == {"drafted": 0.0, "plain": 0.0, "questions": 1}
    assert "exact_match" not in rows["math"]["scores"]
    rouge = rows["translation"]["scores"]
    assert set(rouge) == (set(scores.ROUGES) if scores.has_rouge() else set())
    table = (out / "results.md").read_text()
    assert table.count("| medusa | 3 |") == 7 and "| +0.0% |" in table
    assert (out / "categories.png").read_bytes().startswith(b"\x89PNG")


def test_judges_get_both_turns_of_mt_bench(out):
    judged = read_lines(out / "mt_bench" / "model_answer" / "medusa-3.jsonl")
    answers = {line["question_id"]: line for line in read_lines(out / "medusa-3.jsonl")}
    assert [line["question_id"] for line in judged] == [81, 82]
    for line in judged:
        assert set(line) == {"question_id", "answer_id", "model_id", "choices", "tstamp"}
        (choice,) = line["choices"]
        assert choice == {
            "index": 0,
            "turns": answers[line["question_id"]]["choices"][0]["turns"],
        }
        assert len(choice["turns"]) == 2 and line["model_id"] == "medusa-3"


def test_a_token_too_many_shows_in_the_difference(directory, out, monkeypatch):
    """The relation is checked: tokens that no step made do not pass."""
    found = []

    def watched(own, plain):
        found.append(figures(own, plain))
        for run in own:
            run.texts[0].append(0)
        return figures(own, plain)

    monkeypatch.setattr(answering, "figures", watched)
    monkeypatch.setattr(answering, "step_ratio", lambda *_: 2.0)
    out = out / "again"
    assert bench.main(arguments(directory, out, limit=1)) == 0
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert row["difference"] == pytest.approx(2 / found[0]["tokens"])


def test_the_step_is_timed_in_the_middle_of_a_text_of_median_length(monkeypatch):
    Space, asked = SimpleNamespace, []

    def timed(model, trees, prompt, **flags):
        asked.append((prompt, flags["acceptance"]))
        return [3.0, 2.0]

    monkeypatch.setattr(answering, "step_seconds", timed)
    turns = [Space(drafted=Space(token_ids=[9] * 4, new_tokens=4))]
    answered = [
        Space(turns=[Space(prompt=[i] * n, outcome=turns[0])], temperature=0.35 * i)
        for i, n in enumerate((30, 2, 10))
    ]
    assert answering.step_ratio(None, answered, None, 1) == 1.5
    assert asked == [([2] * 10 + [9, 9], "sampled")]


def test_mt_bench_s_categories_at_fastchat_s_temperatures(monkeypatch):
    drawn = {}

    def compare(model, prompts, options, *, ids, **how):
        drawn[ids[0]] = options.temperature
        return [SimpleNamespace(drafted=SimpleNamespace(text="a"))]

    monkeypatch.setattr(answering, "compare", compare)
    monkeypatch.setattr(conversation, "turn_prompt", lambda *_: ([4], False))
    how = {"repeats": 1, "template": "plain", "room": 9}
    ask = partial(
        answering.answer_all, None, QUESTIONS, Tree.none(), Options(temperature=0.3), **how
    )
    answered = ask(temperatures=MT_BENCH_TEMPERATURES)
    assert [drawn[i] for i in range(5)] == [0.7, 0.0, 0.3, 0.3, 0.3]
    assert [one.temperature for one in answered] == [0.7, 0.0, 0.3, 0.3, 0.3]
    ask()
    assert set(drawn.values()) == {0.3}
