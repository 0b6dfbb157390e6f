"""decode.py, called in this process: what it prints, and what it answers to bad input."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from tiny_model import CONTEXT, write_model, write_tokenizer

import medusa_jax
from medusa_jax.commands import calibrate, sweep, ties
from medusa_jax.commands.decode import main
from medusa_jax.commands.decode_report import summary
from medusa_jax.interop import heads_io

ROOT = Path(__file__).parents[2]
NEW = "20"
FIELDS = {
    "text": str,
    "token_ids": list,
    "prompt_tokens": int,
    "new_tokens": int,
    "steps": int,
    "mean_accepted_length": float,
    "acceptance_histogram": list,
    "prefill_seconds": float,
    "decode_seconds": float,
    "compile_seconds": float,
    "tokens_per_second": float,
    "drafter": str,
    "tree_nodes": int,
    "acceptance": str,
    "lossless": bool,
    "guarantee": str,
    "seed": int,
    "dtype": str,
    "device": str,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


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


@pytest.fixture
def refused(decode):
    """The one line that a bad call prints, without "error: "."""

    def run(*flags, **options):
        status, out, err = decode(*flags, **options)
        assert status == 2 and out == ""
        assert err.startswith("error: ") and err.count("\n") == 1, err
        return err[len("error: ") :]

    return run


def test_text_and_one_line_of_measurements(decode):
    status, out, err = decode("--prompt", "the cat")
    assert status == 0 and out.startswith("the cat") and out.endswith("\n")
    line = err.splitlines()[-1]
    assert re.match(
        r"20 tokens in \d+ steps, mean accepted length \d\.\d\d, \d+ tokens/s "
        r"\(medusa, 4 nodes, greedy, lossless, float32, cpu",
        line,
    ), err
    facts = json.loads(decode("--prompt", "the cat", "--json")[1])
    assert out == "the cat" + facts["text"] + "\n"


def test_json_has_the_documented_fields(decode):
    status, out, _ = decode("--prompt", "the cat", "--json", "--seed", 4, "--compare")
    assert status == 0 and out.count("\n") == 1
    facts = json.loads(out)
    for name, kind in FIELDS.items():
        assert type(facts[name]) is kind, name
    assert facts["new_tokens"] == len(facts["token_ids"]) == 20
    assert sum(facts["acceptance_histogram"]) == facts["steps"]
    counted = sum((i + 1) * n for i, n in enumerate(facts["acceptance_histogram"]))
    assert counted == facts["new_tokens"] - 1
    assert facts["mean_accepted_length"] == pytest.approx(
        counted / facts["steps"], abs=1e-3
    )
    assert (facts["drafter"], facts["tree_nodes"], facts["seed"]) == ("medusa", 4, 4)
    assert (facts["acceptance"], facts["lossless"], facts["dtype"]) == (
        "greedy",
        True,
        "float32",
    )
    plain = facts["autoregressive"]
    assert set(plain) == {"token_ids", "decode_seconds", "tokens_per_second"}
    assert facts["speedup"] > 0 and facts["step_latency_ratio"] > 0
    assert facts["identical"] == (plain["token_ids"] == facts["token_ids"])
    assert (facts["first_divergence"] is None) == facts["identical"]


def test_compare_says_identical(decode):
    _, _, err = decode("--prompt", "the cat", "--compare", "--dtype", "float64")
    assert re.search(
        r"autoregressive \d+ tokens/s: speed-up .*x at .*x the step latency, "
        "identical text",
        err,
    )


def test_rates_and_speed_up_of_a_comparison_are_of_the_same_runs(decode):
    """The text is streamed once more, in a run that is timed by nothing else."""
    flags = ("--prompt", "the cat", "--compare", "--repeats", 2)
    facts = json.loads(decode(*flags, "--json")[1])
    plain = facts["autoregressive"]
    ratio = facts["tokens_per_second"] / plain["tokens_per_second"]
    assert facts["speedup"] == pytest.approx(ratio, rel=1e-9)
    line = summary(facts)
    drafted, theirs = map(int, re.findall(r"(\d+) tokens/s", line))
    shown = float(re.search(r"speed-up ([\d.]+)x", line)[1])
    assert shown == pytest.approx(drafted / theirs, rel=0.05)


def test_a_text_without_a_step_has_no_speedup(decode):
    """Its one token comes from prefill; there is nothing that drafts could make faster."""
    flags = ("--prompt", "the cat", "--max_new_tokens", 1, "--compare", "--repeats", 1)
    _, out, err = decode(*flags, "--json")
    facts = json.loads(out)
    assert facts["speedup"] is None is facts["step_latency_ratio"]
    assert facts["autoregressive"]["tokens_per_second"] == 0 and facts["identical"]
    _, _, err = decode(*flags)
    assert "autoregressive 0 tokens/s: no step to compare, the text ended with its" in err
    assert err.rstrip().endswith("first token, identical text") and "speed-up" not in err


def test_lossy_acceptance_is_labelled(decode):
    flags = ("--prompt", "the", "--acceptance", "typical", "--temperature", 0.7)
    facts = json.loads(decode(*flags, "--json")[1])
    assert facts["acceptance"] == "typical" and facts["lossless"] is False
    assert facts["guarantee"].startswith("LOSSY")
    assert "typical, LOSSY" in decode(*flags)[2]


@pytest.mark.wide
def test_rejection_is_labelled_lossless_in_distribution(decode):
    flags = ("--prompt", "the", "--acceptance", "rejection", "--temperature", 1)
    facts = json.loads(decode(*flags, "--json")[1])
    assert facts["acceptance"] == "rejection" and facts["lossless"] is True
    assert facts["tree_nodes"] == 4
    _, _, err = decode(*flags, "--compare", "--repeats", 1)
    assert "rejection, lossless in distribution" in err
    assert "other draws of the same law" in err


def test_show_drafts_colours_accepted_drafts_only(decode):
    _, out, err = decode("--prompt", "abcab", "--show_drafts")
    _, plain, _ = decode("--prompt", "abcab")
    coloured = re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", out, re.S)
    assert coloured and {c for c, _ in coloured} <= {"32", "36", "34"}
    assert re.sub(r"\x1b\[\d+m", "", out) == plain
    assert "accepted drafts by tree depth" in err


@pytest.mark.wide
def test_one_seed_one_text_whatever_the_tree(decode):
    flags = ("--prompt", "in the", "--json", "--temperature", 1.0, "--top_p", 0.9)
    texts = [
        json.loads(decode(*flags, "--seed", seed, "--dtype", "float64", tree=tree)[1])
        for seed, tree in (
            (3, "none"),
            (3, "chain:2"),
            (3, "cartesian:2,2"),
            (4, "chain:2"),
        )
    ]
    assert texts[0]["token_ids"] == texts[1]["token_ids"] == texts[2]["token_ids"]
    assert texts[3]["token_ids"] != texts[0]["token_ids"]
    assert [t["tree_nodes"] for t in texts] == [1, 3, 7, 3]
    assert texts[0]["drafter"] == "none" and texts[1]["acceptance"] == "sampled"


def test_without_a_drafter(decode):
    facts = json.loads(decode("--prompt", "the cat", "--json", heads="none", tree=None)[1])
    assert facts["drafter"] == "none" and facts["tree_nodes"] == 1
    assert facts["acceptance_histogram"] == [19]


@pytest.mark.wide
def test_tokens_are_copied_beside_heads_and_without_them(decode):
    said = ("--prompt", "in the hat, the cat in the hat", "--json", "--dtype", "float64")
    plain = json.loads(decode(*said, tree="none")[1])
    for heads, tree, by, nodes in (
        ("heads", "chain:2+copy:3", "medusa+copy", 6),
        ("none", "copy:3", "copy", 4),
    ):
        status, out, err = decode(*said, heads=heads, tree=tree)
        assert status == 0, err
        facts = json.loads(out)
        assert facts["token_ids"] == plain["token_ids"]
        assert (facts["drafter"], facts["tree_nodes"]) == (by, nodes)
    assert decode("--prompt", "in", tree="copy:x")[0] == 2


def test_a_tree_without_anybody_to_draft_it(refused):
    for tree in ("chain:2", "2"):
        said = refused("--prompt", "in", heads="none", tree=tree)
        assert "no draft heads are loaded" in said


def test_prompts_file_answers_line_by_line_in_order(decode, tmp_path):
    records = [
        {"prompt": "the cat"},
        {"prompt": "in", "max_new_tokens": 5},
        {"prompt": "the cat", "temperature": 0.9, "seed": 8, "top_p": 0.9},
        {"prompt": "ab\u2028c", "stop": "zzz"},  # a line separator, but not of JSONL
    ]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps(r, ensure_ascii=False) for r in records]
    file.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n", encoding="utf-8")
    status, out, err = decode("--prompts_file", file, "--json", "--dtype", "float64")
    assert status == 0, err
    got = [json.loads(line) for line in out.splitlines()]
    assert [got[i]["new_tokens"] for i in (0, 1, 3)] == [20, 5, 20]
    assert [g["seed"] for g in got] == [0, 0, 8, 0]
    alone = json.loads(decode("--prompt", "the cat", "--json", "--dtype", "float64")[1])
    assert got[0]["token_ids"] == alone["token_ids"] != got[2]["token_ids"]


@pytest.mark.wide
def test_log_probabilities_and_a_limit_in_steps(decode, tmp_path):
    flags = ("--max_steps", 3, "--logprobs", 2)
    facts = json.loads(decode("--prompt", "the cat", "--json", *flags)[1])
    assert facts["steps"] == 3 and facts["finish_reason"] == "steps"
    assert len(facts["logprobs"]) == len(facts["top_logprobs"]) == facts["new_tokens"]
    for token, own, places in zip(
        *(facts[k] for k in ("token_ids", "logprobs", "top_logprobs"))
    ):
        assert places[0] == [token, own] and len(places) == 2  # greedy
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": "the cat", "logprobs": 2, "max_steps": 3}, {"prompt": "the cat"}]
    file.write_text("\n".join(map(json.dumps, records)))
    got = [json.loads(line) for line in decode("--prompts_file", file)[1].splitlines()]
    assert got[0]["token_ids"] == facts["token_ids"] and "logprobs" not in got[1]
    assert len(got[0]["top_logprobs"]) == facts["new_tokens"] and got[1]["new_tokens"] == 20


def test_a_model_without_a_tokenizer_takes_and_gives_ids(
    directory, decode, refused, tmp_path
):
    """The same tokens as with one, and text where there is none is refused."""
    bare = tmp_path / "bare"
    shutil.copytree(directory, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt_ids": [1, 5, 9]}) + "\n")
    got = [
        json.loads(decode("--prompts_file", file, model=model)[1])
        for model in (directory, bare)
    ]
    assert got[0]["token_ids"] == got[1]["token_ids"] and got[1]["text"] == ""
    assert sum(got[1]["accepted_lengths"]) == got[1]["new_tokens"] - 1
    said = refused("--prompt", "a", model=bare)
    assert "holds no tokenizer" in said and "give prompts as token ids" in said
    said = refused("--prompts_file", file, "--stop", "x", model=bare)
    assert "stop strings cannot be found" in said


@pytest.mark.parametrize(
    ("mode", "words"),
    [(os.O_WRONLY, "it is closed"), (os.O_RDONLY, "'utf-8' codec can't decode byte 0xff")],
)
def test_standard_input_that_cannot_be_read(refused, monkeypatch, tmp_path, mode, words):
    """Closed: `console.open_standard_streams` puts a file there that cannot be read."""
    (tmp_path / "bytes").write_bytes(b"a\xff")
    with open(os.open(tmp_path / "bytes", mode), encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert f"cannot read standard input: {words}" in refused("--prompt", "-")


def test_stop_and_standard_input(decode, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat"))
    whole = json.loads(decode("--prompt", "-", "--json")[1])
    stop = whole["text"][6:9]
    facts = json.loads(
        decode("--prompt", "the cat", "--json", "--stop", "@", "--stop", stop)[1]
    )
    assert facts["text"] == whole["text"][: whole["text"].index(stop)]
    assert facts["finish_reason"] == "stop"


def test_the_end_of_the_context_is_told(decode):
    status, out, err = decode("--prompt", "a", "--max_new_tokens", 500)
    assert status == 0 and f"context of {CONTEXT} tokens" in err
    facts = json.loads(decode("--prompt", "a", "--max_new_tokens", 500, "--json")[1])
    assert facts["finish_reason"] == "context"
    assert facts["prompt_tokens"] + facts["new_tokens"] == CONTEXT
    assert out == "a" + facts["text"] + "\n"


def test_an_empty_prompt_starts_from_bos(decode):
    facts = json.loads(decode("--prompt", "", "--json")[1])
    assert facts["prompt_tokens"] == 1 and facts["new_tokens"] == 20


def test_a_tree_file(decode, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    assert (
        json.loads(decode("--prompt", "a", "--json", tree=str(file))[1])["tree_nodes"] == 4
    )


# What the design calls bad input: one line that says what to do, status 2, nothing decoded.


def test_no_bos_to_start_from(refused, tmp_path):
    write_tokenizer(tmp_path, bos=False)
    line = refused("--prompt", "", "--tokenizer", tmp_path)
    assert "empty" in line and "BOS" in line


def test_prompt_longer_than_the_context(refused):
    line = refused("--prompt", "a" * 200)
    assert "201 tokens" in line and f"context is {CONTEXT}" in line


@pytest.mark.parametrize("model", ["/nowhere/at/all", "nothing-of-the-kind"])
def test_model_that_is_not_there(refused, model):
    assert model in refused("--prompt", "a", model=model)


def test_model_directory_without_a_model(refused, tmp_path):
    assert str(tmp_path) in refused("--prompt", "a", model=tmp_path)
    write_tokenizer(tmp_path)
    assert "config.json" in refused("--prompt", "a", model=tmp_path)


def test_heads_that_are_not_there(refused):
    assert "nowhere" in refused("--prompt", "a", heads="nowhere")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"d_model": 24}, ("width 16", "width 24")),
        ({"vocab_size": 50}, ("vocabulary 40", "vocabulary 50")),
        ({"seed": 1}, ("fingerprint",)),
    ],
)
def test_heads_made_for_another_model(refused, tmp_path, fields, words):
    write_model(tmp_path, **fields)
    line = refused("--prompt", "a", model=tmp_path)
    assert all(word in line for word in words), line


def test_the_demos_heads_on_another_model(directory, capsys):
    assert main(["--model", str(directory), "--prompt", "a", "--drafter", "hydra"]) == 2
    assert "--drafter hydra names the demo's heads" in capsys.readouterr().err


def test_another_model_decodes_plainly_unless_heads_are_named(directory, capsys):
    assert main(["--model", str(directory), "--prompt", "a", "--max_new_tokens", "4"]) == 0
    err = capsys.readouterr().err
    assert "no --drafter is given: plain decoding" in err and "(none, 1 nodes" in err


def test_other_commands_ask_for_heads(directory, tmp_path, capsys):
    for module, flags in (
        (calibrate, ["--out", str(tmp_path / "tree.json")]),
        (sweep, ["--out", str(tmp_path)]),
        (ties, ["--out", str(tmp_path / "ties.json")]),
    ):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "a"}\n')
        given = [*flags, "--prompts", str(prompts), "--model", str(directory)]
        assert module.main(given) == 2
        line = capsys.readouterr().err
        assert "give --drafter" in line and str(directory) in line, line


def test_heads_of_another_model_when_allowed(decode, tmp_path):
    write_model(tmp_path, seed=1)
    status, _, err = decode("--prompt", "a", "--allow_other_base", model=tmp_path)
    assert status == 0 and "(medusa, 4 nodes, greedy, lossless" in err


def test_ends_by_token_ids(decode):
    whole = json.loads(decode("--prompt", "the cat", "--json")[1])["token_ids"]
    pair = whole[6:8]
    flags = ("--stop_sequence", ",".join(map(str, pair)), "--stop_sequence", "0,0")
    facts = json.loads(decode("--prompt", "the cat", "--json", *flags)[1])
    end = list(pairwise(whole)).index(tuple(pair)) + 2
    assert (facts["token_ids"], facts["finish_reason"]) == (whole[:end], "stop")
    facts = json.loads(decode("--prompt", "the cat", "--json", "--eos_ids", whole[3])[1])
    assert facts["token_ids"] == whole[: whole.index(whole[3]) + 1]
    facts = json.loads(decode("--prompt", "the cat", "--json", "--eos_ids", "none")[1])
    assert facts["token_ids"] == whole


def test_ends_of_each_request(decode, tmp_path):
    file = tmp_path / "prompts.jsonl"
    whole = json.loads(decode("--prompt", "the cat", "--json")[1])["token_ids"]
    ends = [{"eos_ids": [whole[2]]}, {"stop_sequences": [whole[4:6], [0]]}, {}]
    file.write_text("".join(json.dumps({"prompt": "the cat"} | e) + "\n" for e in ends))
    got = [json.loads(x) for x in decode("--prompts_file", file)[1].splitlines()]
    counts = [whole.index(whole[2]) + 1]
    counts += [list(pairwise(whole)).index(tuple(whole[4:6])) + 2, 20]
    assert [g["token_ids"] for g in got] == [whole[:n] for n in counts]


def test_tree_deeper_than_the_heads(refused, tmp_path):
    assert "[0, 0, 0, 0]" in refused("--prompt", "a", tree="chain:4")
    file = tmp_path / "deep.json"
    file.write_text("[[0], [0, 2], [0, 2, 0], [0, 2, 0, 1]]")
    assert "[0, 2, 0, 1] is 4 deep" in refused("--prompt", "a", tree=str(file))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[0], [1", "not valid JSON"),
        ('{"nodes": 3}', "choices"),
        ("[[0], [3, 1]]", "[3, 1] needs its prefix [3]"),
        ("[[0], [0]]", "[0] is given twice"),
        ('[["a"]]', "whole numbers"),
        ("[[9999]]", "9999 exceeds the vocabulary"),
    ],
)
def test_malformed_trees(refused, tmp_path, content, words):
    file = tmp_path / "tree.json"
    file.write_text(content)
    assert words in refused("--prompt", "a", tree=str(file))


@pytest.mark.parametrize(
    ("tree", "words"),
    [("64", "calibrate"), ("chain:x", "chain:4"), ("nothing.json", "nothing.json")],
)
def test_trees_that_are_not_there(refused, tree, words):
    assert words in refused("--prompt", "a", tree=tree)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--mesh", "1,1,64"), "64 devices"),
        (("--mesh", "1,1"), "data,fsdp,tensor"),
        (("--mesh", "a,b,c"), "three numbers"),
        (("--acceptance", "greedy", "--temperature", "1"), "temperature 0"),
        (("--acceptance", "eager"), "greedy, rejection, sampled, typical, not 'eager'"),
        (("--temperature", "-1"), "temperature"),
        (("--top_p", "0"), "top_p"),
        (("--no_repeat_ngram_size", "-1"), "no_repeat_ngram_size must be 0"),
        (("--no_repeat_ngram_size", "1000000000"), "0 (off) to 64, not 1000000000"),
        (("--max_new_tokens", "0"), "max_new_tokens"),
        (("--max_steps", "0"), "max_steps"),
        (("--logprobs", "2"), "--logprobs is shown in JSON only"),
        (("--json", "--save_drafts", "x.svg"), "--save_drafts draws one text"),
        (("--eos_ids", "2,x"), "--eos_ids is a list like 1,4,8"),
        (("--stop_sequence", "none"), "at least one token id"),
        (("--stop_sequence", "1,-4"), "stop_sequences are lists"),
        (("--prompts_file", "x"), "either --prompt TEXT or --prompts_file"),
    ],
)
def test_flags_that_do_not_fit(refused, flags, words):
    assert words in refused("--prompt", "a", *flags)


def test_no_prompt_at_all(refused):
    assert "--prompt" in refused()


@pytest.mark.parametrize("flags", [("--dtype", "int8"), ("--bogus",)])
def test_flags_that_are_unknown(decode, capsys, flags):
    with pytest.raises(SystemExit) as caught:
        decode("--prompt", "a", *flags)
    assert caught.value.code == 2
    assert flags[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2: a request needs a 'prompt', 'prompt_ids' or 'messages'"),
        ('{"text": "a"}', "line 2: a request needs a 'prompt', 'prompt_ids' or 'messages'"),
        ('{"prompt": 5}', "line 2"),
        ('{"prompt_ids": ["a"]}', "line 2: 'prompt_ids' must be a list of token ids"),
        ('{"prompt_ids": [99999]}', "a prompt id is outside the vocabulary"),
        ('{"prompt": null}', "line 2"),
        ('{"prompt": "\\ud800"}', "unpaired surrogate"),
        ('{"messages": "hello"}', "messages"),
        ('{"prompt": "a", "temperature": "hot"}', "line 2"),
        ('{"prompt": "a", "temperature": -1}', "line 2: temperature"),
        ('{"prompt": "a", "seed": "x"}', "line 2"),
        ('{"prompt": "a", "max_new_tokens": 2.5}', "line 2"),
        ('{"prompt": "a", "max_steps": "x"}', "line 2: 'max_steps' must be int"),
        ('{"prompt": "a", "stop": 5}', "line 2"),
        ('{"prompt": "a", "stop": [5]}', "line 2"),
        ('{"prompt": "a", "eos_ids": 5}', "line 2: 'eos_ids' must be a list of token ids"),
        ('{"prompt": "a", "eos_ids": [true]}', "line 2: 'eos_ids' must be"),
        ('{"prompt": "a", "stop_sequences": [5]}', "line 2: 'stop_sequences' must be"),
        ('{"prompt": "a", "stop_sequences": 5}', "line 2: 'stop_sequences' must be"),
        ('{"prompt": "a", "stop_sequences": [[]]}', "line 2: stop_sequences are lists"),
        ('{"promt": "a", "prompt": "a"}', "line 2: unknown field 'promt'; did you mean 'p"),
        ('{"prompt": "a", "max_tokens": 5}', "line 2: unknown field 'max_tokens'; did you"),
        ('{"prompt": "a", "banana": 5}', "unknown field 'banana' (there are: prompt, "),
        (
            '{"prompt": "a", "prompt_ids": [5]}',
            "one prompt, not both 'prompt' and 'prompt_",
        ),
        ('{"prompt": ' + "[" * 200_000, "line 2 cannot be read"),
        ('{"prompt": "a", "seed": ' + "9" * 5_000 + "}", "line 2 cannot be read"),
    ],
)
def test_prompts_files_with_a_bad_line(refused, tmp_path, line, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    assert words in refused("--prompts_file", file)


def test_prompts_files_without_requests(refused, tmp_path):
    file = tmp_path / "prompts.jsonl"
    assert str(file) in refused("--prompts_file", file)
    file.write_text("\n\n")
    assert "holds no requests" in refused("--prompts_file", file)


def test_heads_files_with_a_bad_description(refused, directory, tmp_path):
    heads = tmp_path / "heads"
    heads.mkdir()
    for name in (heads_io.WEIGHTS, heads_io.DESCRIPTION):
        (heads / name).write_bytes((directory / "heads" / name).read_bytes())
    for content in ("{", "[]", "{}", '{"heads": 3}', '{"heads": {"n_heads": "3"}}'):
        (heads / heads_io.DESCRIPTION).write_text(content)
        for tree in ("chain:2", "auto"):
            assert heads_io.DESCRIPTION in refused(
                "--prompt", "a", heads=str(heads), tree=tree
            )


def test_out_of_memory_is_one_line(decode, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes.\nmore")

    monkeypatch.setattr(medusa_jax.api.Model, "generate", full)
    status, _, err = decode("--prompt", "a", "--json")
    assert status == 2 and err.count("\n") == 1
    assert "out of device memory" in err and "--dtype" in err and "1234" in err


def test_other_errors_are_not_hidden(decode, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(medusa_jax.api.Model, "generate", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        decode("--prompt", "a", "--json")


def test_help_is_quick_and_imports_no_jax():
    """CPU seconds, so that a busy machine plays no part."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "decode.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "--show_drafts" in done.stdout
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 1
    code = "import sys, medusa_jax.commands.decode as d; d.parser(); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "False", done.stderr


# --chat: the prompt goes through a chat template, its turn ends stop the text.

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}ask: {{ m['content'] }}."
    "{% else %}say: {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}say: {% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A tokenizer directory with a chat template of its own."""
    path = tmp_path_factory.mktemp("chatty")
    write_tokenizer(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_chat_wraps_the_prompt_in_the_tokenizers_template(decode, chatty):
    flags = ("--tokenizer", chatty, "--json", "--dtype", "float64")
    status, out, err = decode("--prompt", "the cat", "--chat", *flags)
    assert status == 0, err
    got = json.loads(out)
    plain = json.loads(decode("--prompt", "ask: the cat.say: ", *flags)[1])
    assert got["prompt_tokens"] == plain["prompt_tokens"]
    assert got["token_ids"] == plain["token_ids"]
    bare = json.loads(decode("--prompt", "the cat", *flags)[1])
    assert got["token_ids"] != bare["token_ids"]


def test_chat_with_a_shipped_template_and_with_none(decode, refused, directory):
    got = json.loads(decode("--prompt", "the cat", "--chat", "zephyr", "--json")[1])
    bare = json.loads(decode("--prompt", "the cat", "--json")[1])
    assert got["prompt_tokens"] > bare["prompt_tokens"]
    assert "no chat template" in refused("--prompt", "the cat", "--chat")
    assert "did you mean 'vicuna'" in refused("--prompt", "the cat", "--chat", "vicunha")


def test_a_chat_runs_on_one_host(decode, monkeypatch):
    """The others have no keyboard. A process that fails among several ends at once."""
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "error: a chat runs on one host" in decode("--chat", "zephyr")[2]
    assert statuses == [2]


def test_messages_in_a_prompts_file_use_the_template(decode, chatty, tmp_path):
    turns = [
        {"role": "user", "content": "in"},
        {"role": "assistant", "content": "the hat"},
        {"role": "user", "content": "a cat"},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"messages": turns}) + "\n")
    flags = ("--tokenizer", chatty, "--dtype", "float64")
    [line] = decode("--prompts_file", file, *flags)[1].splitlines()
    text = "ask: in.say: the hat</s>ask: a cat.say: "
    plain = json.loads(decode("--prompt", text, "--json", *flags)[1])
    assert json.loads(line)["token_ids"] == plain["token_ids"]
    file.write_text(json.dumps({"messages": turns[:2]}) + "\n")
    assert "last turn has to be the user's" in decode("--prompts_file", file, *flags)[2]


@pytest.mark.wide
def test_a_file_larger_than_a_batch_keeps_texts_and_order(decode, tmp_path):
    """Every batch size gives every request the same text: its number decides the draws."""
    file = tmp_path / "requests.jsonl"
    prompts = ["the cat", "in", "in", "abc, a hat", "e"]
    lines = [
        json.dumps({"prompt": p, "max_new_tokens": 6 + i}) for i, p in enumerate(prompts)
    ]
    file.write_text("\n".join(lines))
    flags = ("--prompts_file", file, "--dtype", "float64", "--temperature", 1.1)
    outcomes = []
    for size in (2, 5):
        status, out, _ = decode(*flags, "--batch_size", size)
        got = [json.loads(line) for line in out.splitlines()]
        assert status == 0 and len(got) == 5
        assert all(g["new_tokens"] <= 6 + i for i, g in enumerate(got))
        outcomes.append([g["token_ids"] for g in got])
    assert outcomes[0] == outcomes[1]
    # One seed and one prompt, but two requests: other noise, another text.
    assert outcomes[0][1] != outcomes[0][2][:7]


@pytest.mark.wide
def test_a_progress_bar_for_people_only(decode, tmp_path, monkeypatch):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "a"}\n' * 3)
    assert "request/s" not in decode("--prompts_file", file)[2]  # not a terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, out, err = decode("--prompts_file", file, "--batch_size", 2)
    assert status == 0 and out.count("\n") == 3 and "3/3" in err
    assert all(json.loads(line)["new_tokens"] == 20 for line in out.splitlines())
    assert "--batch_size" in decode("--prompts_file", file, "--batch_size", 0)[2]
