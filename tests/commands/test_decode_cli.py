"""decode.py, called in this process: flags, what it prints, and what it answers to bad input."""

import dataclasses
import io
import json
import re
import shutil
import sys

import numpy as np
import pytest
from cases import wide
from files import write_lines
from tiny import TEMPLATE, set_template, write_coder

from medusa_jax import Options, load, progress
from medusa_jax.api.tree_choice import VARIABLE
from medusa_jax.commands.decode import main
from medusa_jax.commands.decode_report import describe, summary
from medusa_jax.commands.requests import read_requests, shared_options
from medusa_jax.decoding.chunk_clock import ChunkClock
from medusa_jax.decoding.constrained import MANY
from medusa_jax.decoding.tree_size.costs import StepCosts
from medusa_jax.evaluate.compare import compare

NEW = "20"
FIELDS = dict.fromkeys(["text", "drafter", "acceptance", "guarantee"], str)
FIELDS |= dict.fromkeys(["dtype", "device"], str)
FIELDS |= dict.fromkeys(["token_ids", "acceptance_histogram"], list)
FIELDS |= dict.fromkeys(["prompt_tokens", "new_tokens", "steps", "tree_nodes", "seed"], int)
SECONDS = [f"{part}_seconds" for part in ("prefill", "decode", "compile")]
FIELDS |= dict.fromkeys(["mean_accepted_length", "tokens_per_second", *SECONDS], float)
FIELDS |= {"lossless": bool}


@pytest.fixture
def decode(directory, capsys):
    """Run decode.py on the tiny model; returns (status, stdout, stderr)."""

    def run(*flags, heads="heads", tree="chain:3", model=directory):
        given = ["--model", str(model), "--max_new_tokens", NEW]
        given += ["--drafter", heads if heads == "none" else str(directory / heads)]
        given += ["--tree", tree] if tree else []
        capsys.readouterr()
        status = main([*given, *map(str, flags)])
        return status, *capsys.readouterr()

    return run


def test_text_and_json_with_the_documented_fields(decode):
    status, text, err = decode("--prompt", "the cat")
    assert status == 0 and "20 tokens in " in err and ", medusa, 4 nodes, greedy, " in err
    times = r"first token after (\S+) s: loaded in (\S+) s, compiled in (\S+) s, prompt read in (\S+) s"
    total, *parts = map(float, re.search(times, err).groups())
    assert abs(total - sum(parts)) < 0.2 and min(parts) >= 0 < parts[1]
    assert "mostly plain" not in decode("--prompt", "the cat", tree="none")[2]
    status, out, _ = decode("--prompt", "the cat", "--json", "--seed", 4, "--compare")
    assert status == 0 and out.count("\n") == 1
    facts = json.loads(out)
    assert text == "the cat" + facts["text"] + "\n"
    for name, kind in FIELDS.items():
        assert type(facts[name]) is kind, name
    assert facts["new_tokens"] == len(facts["token_ids"]) == 20
    counted = sum((i + 1) * n for i, n in enumerate(facts["acceptance_histogram"]))
    assert counted == facts["new_tokens"] - 1 == sum(facts["accepted_lengths"])
    assert (facts["drafter"], facts["tree_nodes"], facts["seed"]) == ("medusa", 4, 4)
    plain = facts["autoregressive"]
    assert set(plain) == {"token_ids", "decode_seconds", "tokens_per_second"}
    assert facts["speedup"] > 0 and facts["step_latency_ratio"] > 0
    assert facts["identical"] == (plain["token_ids"] == facts["token_ids"])
    assert (facts["first_divergence"] is None) == facts["identical"]


def test_a_comparison_reports_a_timed_run_and_the_start_of_the_shown_one(directory):
    model = load(directory, str(directory / "heads"), tree="chain:3")
    [compared] = compare(model, ["the cat"], Options(max_new_tokens=20), repeats=1)
    shown = dataclasses.replace(compared.autoregressive, compile_seconds=7.0)
    facts = describe(model, shown, "greedy", Options(), compared)
    assert facts["steps"] == compared.drafted.steps < shown.steps == 19
    length = facts["speedup"] * facts["step_latency_ratio"]
    assert facts["mean_accepted_length"] == pytest.approx(length, abs=1e-4)
    said = summary(facts, 1.0, 8.0, 2.0)
    assert said.count(f"mean accepted length {length:.2f}") == 2
    assert "compiled in 6.0 s, prompt read in 2.00 s; steps compiled in 1.0 s" in said


def test_what_is_advised_after_plain_steps(decode, monkeypatch):
    """A tree can be fitted to heads alone."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(StepCosts, "ratios", lambda self, *sizes: np.float32([1, 9, 9]))
    monkeypatch.setattr(ChunkClock, "size_to_time", lambda self: None)
    for more, fits in (((), True), (("--drafter", "prompt_lookup"), False)):
        said = decode("--prompt", "in the hat", *more, tree=None)[2]
        assert "medusa train" in said and ("medusa calibrate" in said) == fits


@pytest.mark.wide
def test_constrained_text_names_the_tree_that_its_steps_took(decode):
    """The model's, with a chain for what is forced."""
    flags = "--prompt", "the cat", "--constraint", "regex:[a-z ]{12}", "--json"
    facts = json.loads(decode(*flags)[1])
    assert (facts["drafter"], facts["tree_nodes"]) == ("medusa+copy", 4 + MANY)
    assert len(facts["acceptance_histogram"]) == 1 + MANY


def test_show_drafts_colours_accepted_drafts_only(decode):
    _, out, err = decode("--prompt", "abcab", "--show_drafts")
    _, plain, _ = decode("--prompt", "abcab")
    coloured = re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", out, re.S)
    assert coloured and {c for c, _ in coloured} <= {"32", "36", "34"}
    assert re.sub(r"\x1b\[\d+m", "", out) == plain
    assert "accepted drafts by tree depth" in err
    said = ("--prompt", "in the hat, the cat in the hat", "--show_drafts")
    for more in ((), ("--drafter", "prompt_lookup")):
        _, out, _ = decode(*said, *more, heads="none", tree="copy:3")
        assert {c for c, _ in re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", out, re.S)} == {"4"}


@pytest.mark.wide
@pytest.mark.parametrize("few", [1, *wide(3)])
def test_prompts_file_answers_line_by_line_in_order(decode, tmp_path, few, monkeypatch):
    for name in ("LINES", "SHARE"):
        monkeypatch.setattr(progress, name, -1.0)
    records = [
        {"prompt": "the cat"},
        {"prompt": "in", "max_new_tokens": 5},
        {"prompt": "the cat", "temperature": 0.9, "seed": 8, "top_p": 0.9},
        {"prompt": "ab\u2028c", "stop": "zzz"},  # a line separator, but not of JSONL
    ]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps(r, ensure_ascii=False) for r in records]
    file.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n", encoding="utf-8")
    flags = ("--prompts_file", file, "--dtype", "float64")
    got, again = [], []
    for size, answers in ((8, got), (few, again)):  # no size changes a text
        status, out, err = decode(*flags, "--batch_size", size)
        assert status == 0, err
        answers += [json.loads(line) for line in out.splitlines()]
    assert [g["token_ids"] for g in got] == [g["token_ids"] for g in again]
    assert [got[i]["new_tokens"] for i in (0, 1, 3)] == [20, 5, 20]
    assert [g["seed"] for g in got] == [0, 0, 8, 0]
    assert "answers: 0 of 4 requests, compiling and decoding, " in err
    assert "4 requests, 65 tokens in " in err and "accepted_lengths" not in got[0]
    alone = json.loads(decode("--prompt", "the cat", "--json", "--dtype", "float64")[1])
    assert got[0]["token_ids"] == alone["token_ids"] != got[2]["token_ids"]


def test_a_model_without_a_tokenizer(directory, decode, tmp_path):
    """It takes ids and gives the same tokens as with one, and text where there is none is refused."""
    bare = tmp_path / "bare"
    shutil.copytree(directory, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    file = write_lines(tmp_path / "prompts.jsonl", [{"prompt_ids": [1, 5, 9]}])
    got = [
        json.loads(decode("--prompts_file", file, "--show_drafts", model=model)[1])
        for model in (directory, bare)
    ]
    assert got[0]["token_ids"] == got[1]["token_ids"] and got[1]["text"] == ""
    assert sum(got[1]["accepted_lengths"]) == got[1]["new_tokens"] - 1
    assert len(got[1]["draft_depths"]) == got[1]["new_tokens"]
    said = decode("--prompt", "a", model=bare)[2]
    assert "holds no tokenizer" in said and "give prompts as token ids" in said
    said = decode("--prompts_file", file, "--stop", "x", model=bare)[2]
    assert "stop strings cannot be found" in said


def test_stop_and_standard_input(decode, monkeypatch):
    """A byte order mark on standard input does not reach the prompt."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffthe cat"))
    whole = json.loads(decode("--prompt", "-", "--json")[1])
    stop = whole["text"][6:9]
    stops = ("--stop", "@", "--stop", stop)
    facts = json.loads(decode("--prompt", "the cat", "--json", *stops)[1])
    assert facts["text"] == whole["text"][: whole["text"].index(stop)]
    assert facts["finish_reason"] == "stop"


# --chat: the prompt goes through a chat template, its turn ends stop the text.


def test_chat_wraps_prompts_and_messages_in_the_tokenizers_template(
    decode, chatty, tmp_path
):
    flags = ("--tokenizer", chatty, "--dtype", "float64")

    def said(*given):
        status, out, err = decode(*given, *flags)
        assert status == 0, err
        facts = json.loads(out)
        return facts["prompt_tokens"], facts["token_ids"]

    chat = said("--prompt", "the cat", "--chat", "--json")
    assert chat == said("--prompt", "uthe cat.a", "--raw", "--json")
    assert chat[1] != said("--prompt", "the cat", "--raw", "--json")[1]
    texts = ("user", "in"), ("assistant", "the hat"), ("user", "a cat")
    turns = [{"role": role, "content": text} for role, text in texts]
    file = write_lines(tmp_path / "requests.jsonl", [{"messages": turns}])
    raw = said("--prompt", "uin.athe hat</s>ua cat.a", "--raw", "--json")
    assert said("--prompts_file", file) == raw
    write_lines(file, [{"messages": turns[:2]}])
    assert "last turn has to be the user's" in decode("--prompts_file", file, *flags)[2]


def test_messages_end_where_their_template_ends_a_turn(decode, chatty, tmp_path):
    """Whatever the flags say, and of a base model, whose texts do not end there: here at <s>."""
    shutil.copytree(chatty, base := tmp_path / "base")
    set_template(base, TEMPLATE.replace("eos_token", "bos_token"))
    lines = [{"messages": [{"role": "user", "content": "in"}]}, {"prompt": "uin.a"}]
    file = write_lines(tmp_path / "requests.jsonl", lines)
    flags = ("--prompts_file", file, "--tokenizer", base, "--logit_bias", "1=1000")
    for more in ((), ("--raw",)):
        facts = [json.loads(line) for line in decode(*flags, *more)[1].splitlines()]
        ends = [(f["form"], f["prompt_tokens"], f["new_tokens"]) for f in facts]
        assert ends == [("chat", 5, 1), ("raw text", 5, 20)]


ANY = "true"


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("", {}),
        ("--constraint json_object", {"constraint": {"json_object": True}}),
        ("--constraint regex:a:b|c", {"constraint": {"regex": "a:b|c"}}),
        ("--constraint choice:yes|no", {"constraint": {"choice": ["yes", "no"]}}),
        ("--constraint json_schema:{file}", {"constraint": {"json_schema": ANY}}),
        ("--constraint grammar:{file}", {"constraint": {"grammar": ANY}}),
        ("--logit_bias 15=-100,7=2.5,", {"logit_bias": {7: 2.5, 15: -100}}),
        ("--repetition_penalty 1.2", {"repetition_penalty": 1.2}),
        ("--eos_ids 3,", {"eos_ids": (3,)}),
        ("--eos_ids none", {"eos_ids": ()}),
    ],
)
def test_flags(flags, options, tmp_path):
    file = tmp_path / "file"
    file.write_text(ANY)
    parsed = main.parse(["--prompt", "a", *flags.format(file=file).split()])
    assert shared_options(parsed) == Options(**options)


def test_lines_of_a_file(tmp_path):
    """Each line's fields; those of the flags where it has none."""
    own = {"constraint": {"choice": ["a"]}, "logit_bias": {"3": 1}, "presence_penalty": 1}
    own |= {"eos_ids": [5], "logprobs": 2}
    file = write_lines(
        tmp_path / "requests.jsonl", [{"prompt": "x"} | own, {"prompt": "y"}]
    )
    flags = main.parse(["--prompts_file", str(file), "--constraint", "regex:b"])
    _, [first, second] = read_requests(flags)
    assert first == Options(**own)
    assert second == Options(constraint={"regex": "b"})


@pytest.mark.wide
def test_a_middle_between_two_files(decode, tmp_path):
    write_coder(tmp_path / "coder")
    texts = {"prefix": "def f(", "suffix": "):\n"}
    files = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        files += [f"--{name}_file", tmp_path / name]
    coder = {"model": tmp_path / "coder", "heads": "none", "tree": None}
    status, text, err = decode(*files, **coder)
    assert status == 0 and "a middle" in err
    model = load(str(tmp_path / "coder"), "none")
    assert text == model.complete(**texts, options=Options(20)).text + "\n"
    assert model.complete(**texts, options=Options(20), tree="copy:3").text + "\n" == text
    assert "cannot fill in a middle" in decode(*files)[2]
    assert "needs a --prefix_file" in decode(*files[2:])[2]
    assert "give one of" in decode(*files, "--prompt", "a")[2]
    assert "--chat answers turns" in decode(*files, "--chat")[2]
