"""Self-distillation: conversations turn by turn, files, and a run that is killed and resumed."""

import json
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from children import environment
from files import read_lines, write_lines
from refusals import refused
from tiny import tiny_arch, write_ending_model

from medusa_jax.commands import distill
from medusa_jax.config import DataConfig
from medusa_jax.distill import conversation, files
from medusa_jax.distill.seeds import Seed, mode_for, read_seeds, silent_seeds
from medusa_jax.distill.writer import Writer
from medusa_jax.evaluate.texts import distilled_texts
from medusa_jax.text import answers
from medusa_jax.text.chat import encode_prompt
from medusa_jax.text.tokenizer import load_tokenizer
from medusa_jax.training.data.asked import asked
from medusa_jax.training.data.conversations import RecordEncoder
from medusa_jax.training.data.rows import TokenRows

SAID = [("System", "s"), ("gpt", "cut"), ("human", "a"), ("gpt", "b"), ("human", "c")]
SAID = [{"from": who, "value": text} for who, text in SAID]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    write_ending_model(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(str(model))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"turns": ["hi", "and", " "]}, {"turns": ("hi", "and")}),
        (SAID, {"system": "s", "turns": ("a", "c")}),
        ({"conversations": SAID}, {"system": "s", "turns": ("a", "c")}),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "x"}, 5]},
         {"turns": ("a",)}),
        ({"prompt": "a"}, {"prompt": "a", "turns": ("a",)}),
        ({"system": "s", "prompt": "a", "context": "b"},
         {"prompt": "a", "system": "s", "turns": ("a\n\nb",)}),
        ({"prompt": "a", "prompt_ids": [4, 5]}, {"prompt": [4, 5]}),
        ({"instruction": "a", "input": "b", "output": "c"}, {"turns": ("a\n\nb",)}),
        ({"instruction": "a", "input": "b"}, {"turns": ("a\n\nb",)}),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": []}, {"turns": ("a",)}),
        ({"messages": [{"role": "user", "content": "m"}], "turns": ["t"], "prompt": "p"}, {"turns": ("m",)}),
        ({"turns": ["t"], "system": "s"}, {"system": "s", "turns": ("t",)}),
    ],
)  # fmt: skip
def test_seeds_of_every_form(record, expected):
    """Lines have the roles and fields of training data, and the answers are the model's."""
    assert Seed(3, *asked(record)[:3]) == Seed(3, **expected)


def test_records_that_ask_nothing_are_named(tmp_path, capsys):
    """Their numbers stay: an answer's draws depend on them."""
    file = tmp_path / "a.jsonl"
    lines = [b'\xef\xbb\xbf{"prompt": "a"}', b"", b"{", b'"\xfc"', b"{}"]
    lines += [b'{"prompt": "b"}', b'{"messages": [{"who": "a", "text": "b"}]}']
    lines += [b'{"prompt_ids": [%s]}' % ids for ids in (b"4", b"true", b"-1", b"23")]
    lines += [b'{"prompt": "\\ud800"}', b'{"prompt_ids": "4", "prompt": "a"}']
    lines += [b'{"messages": "USER: a", "prompt": "a"}']
    file.write_bytes(b"\r\n".join(lines))
    seeds = read_seeds(str(file), "train", 0, vocab_size=23)
    assert [(s.number, s.prompt) for s in seeds] == [(0, "a"), (4, "b"), (6, [4])]
    said = capsys.readouterr().err
    reasons = "broken JSON, first in line 3; 1 x not UTF-8, first in line 4"
    refused_ids = "4 x prompt_ids that are not token ids below 23, first in line 9"
    assert "1 x an unpaired surrogate, no valid character, first in line 12" in said
    assert f"10 of 13 records skipped ({refused_ids}; 1 x {reasons}; 1 x nothing" in said
    assert "1 x no user turn, first in line 14" in said
    assert "1 x a turn with who, text, but none of role, from" in said
    limited = read_seeds(str(file), "train", 2, vocab_size=23)  # two that ask something
    assert limited == seeds[:2]
    file.write_bytes(b"\n".join(lines[2:5]))
    with refused(r"has nothing to ask .*broken JSON, first in line 1"):
        read_seeds(str(file), "train", 0)


def test_modes():
    prompts, talks = [Seed(0, "a", turns=("a",))], [Seed(0, turns=("a",)), Seed(1)]
    assert mode_for(prompts, "auto") == mode_for([Seed(0, [4])], "auto", True) == "continue"
    assert mode_for(prompts, "auto", True) == "multi_turn"
    assert mode_for(talks, "auto") == "multi_turn"
    assert mode_for(prompts, "self_talk") == "self_talk"
    for seeds, mode in ((talks, "continue"), ([Seed(0, [4])], "multi_turn"), (talks, "x")):
        with refused("--mode"):
            mode_for(seeds, mode)


def converse(tokenizer, lines, self_talk=False, turns=3, context=200, size=99999):
    """(talk, asked): seeds -> their records, of an engine that says these lines; its prompts."""
    asked = []

    def script(turns, numbers, take):
        for i, (turn, number) in enumerate(zip(turns, numbers)):
            prompt = tokenizer.decode(turn.prompt, skip_special=False)
            asked.append((number, prompt, turn.stop or ""))
            text, finish = lines[number].pop(0)
            said = [*tokenizer.encode(text), *([2] if finish == "stop" else [])]
            result = {"token_ids": said, "text": text, "finish_reason": finish, "steps": 1}
            take(i, SimpleNamespace(**result))

    def talk(seeds):
        found = {}
        given = (
            tokenizer,
            tiny_arch(max_position=context, vocab_size=size),
            "",
            self_talk,
            turns,
        )
        talks = [(seed.number, conversation.talk(seed, *given)) for seed in seeds]
        keep = lambda line: found.update({line["seed"]: line})  # noqa: E731
        conversation.converse(talks, script, keep)
        return [found[seed.number] for seed in seeds]

    return talk, asked


def contents(record):
    return [m["content"] for m in record["messages"]]


def test_multi_turn_asks_the_seed_s_turns_over_its_own_answers(tokenizer):
    lines = {0: [("yes", "stop"), (" no ", "stop")], 1: [("ab", "length")]}
    lines[3] = [("", "stop")]
    talk, asked = converse(tokenizer, lines)
    seeds = [Seed(0, system="s", turns=("hi", "and")), Seed(1, turns=("abc", "more")),
             Seed(2), Seed(3, turns=("x",))]  # fmt: skip
    records = talk(seeds)
    assert contents(records[0]) == ["s", "hi", "yes", "and", "no"]
    assert "cut" not in records[0] and "problem" not in records[0]
    assert contents(records[1]) == ["abc", "ab"] and records[1]["cut"]
    assert "cut off (length)" in records[1]["problem"]
    assert not records[2]["answers"] and "no user turn" in records[2]["problem"]
    assert contents(records[3]) == ["x"] and records[3]["problem"] == "an empty answer"
    assert asked[0][1] == "<s>s\nu hi\na"
    assert asked[-1] == (0, "<s>s\nu hi\na yes</s>u and\na", "")


def test_a_character_that_was_cut_in_two_is_left_out(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "decode", lambda ids, skip_special=True: "ab\ufffd")
    for finish, said in (("length", "ab"), ("stop", "ab\ufffd")):
        talk, _ = converse(tokenizer, {0: [("ab", finish)]})
        assert contents(talk([Seed(0, turns=("x",))])[0]) == ["x", said]


def test_most_turns_and_the_context(tokenizer):
    lines = {0: [("b", "stop")] * 5}
    talk, _ = converse(tokenizer, lines, turns=2)
    assert contents(talk([Seed(0, turns=("x", "y", "z"))])[0]) == ["x", "b", "y", "b"]
    talk, _ = converse(tokenizer, {0: [("b", "stop")] * 5}, context=14)
    record = talk([Seed(0, turns=("x", "more of it", "z"))])[0]
    assert contents(record) == ["x", "b"] and record["problem"] == "the context is full"
    talk, _ = converse(tokenizer, {0: [("b", "stop")] * 5}, size=5)
    assert "without an embedding" in talk([Seed(0, turns=("x",))])[0]["problem"]


def test_self_talk_writes_the_user_s_turns_too(tokenizer):
    whole = [(word, "stop") for word in ("yes", "why", "so", "ok", "x")]
    lines = {0: whole, 1: [("yes", "stop"), ("endless", "length")]}
    talk, asked = converse(tokenizer, lines, self_talk=True)
    records = talk([Seed(0, turns=("hi", "unused")), Seed(1, turns=("hi",))])
    assert contents(records[0]) == ["hi", "yes", "why", "so", "ok", "x"]
    assert [m["role"] for m in records[0]["messages"]] == ["user", "assistant"] * 3
    assert contents(records[1]) == ["hi", "yes"]
    assert "no further user turn" in records[1]["problem"]
    # The model goes on right after the words that open a user's turn.
    assert asked[2] == (0, "<s>u hi\na yes</s>u", "a")


def test_a_silent_seed_s_first_turn_is_the_model_s_own(tokenizer):
    lines = {0: [("hi", "stop"), ("yes", "stop")], 1: [("endless", "length")]}
    talk, asked = converse(tokenizer, lines, self_talk=True, turns=1)
    answered, unasked = talk(silent_seeds(2))
    assert contents(answered) == ["hi", "yes"] and "problem" not in answered
    assert not unasked["answers"] and "no further user turn" in unasked["problem"]
    assert asked[0] == (0, "<s>u", "a") and asked[2] == (0, "<s>u hi\na", "")
    # A seed that was meant to say something is not made up.
    assert "no user turn" in talk([Seed(3)])[0]["problem"]


@pytest.mark.parametrize(
    ("name", "opening", "stop"),
    [
        ("zephyr", "yes</s>\n<|user|>\n", ""),
        ("vicuna", "yes</s>USER:", "ASSISTANT:"),
        ("mistral", "yes</s>[INST]", "[/INST]"),
    ],
)
def test_where_a_user_s_turn_opens(tokenizer, monkeypatch, name, opening, stop):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    seen, real = [], answers.tokenize
    spy = lambda t, text, name: seen.append(text) or real(t, text, name)  # noqa: E731
    monkeypatch.setattr(answers, "tokenize", spy)
    assert answers.encode_user_opening(tokenizer, talk, name)[1] == stop
    assert seen[0].endswith(opening)


def test_an_answer_that_was_cut_does_not_teach_to_stop(tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    encode = RecordEncoder(tokenizer, DataConfig())
    ids, whole = encode({"messages": messages}).pieces[0]
    _, cut = encode({"messages": messages, "cut": True}).pieces[0]
    at = [i for i, (a, b) in enumerate(zip(whole, cut)) if a != b]
    assert [ids[i] for i in at] == [2] and (whole[at[0]], cut[at[0]]) == (1, 0)


def flags_for(model, out, seeds, *more):
    return [
        f"--model={model}", f"--prompts={seeds}", f"--out={out}", "--batch_size=4",
        "--max_new_tokens=12", "--temperature=0.8", *more,
    ]  # fmt: skip


WORDS = ["the", "cat", "in", "a", "bar", "is", "there", "and", "are", "abc"]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Forty conversations of one to three user turns, and one line that is broken."""
    rng, file = np.random.default_rng(0), tmp_path_factory.mktemp("seeds") / "seeds.jsonl"
    talks = [[" ".join(rng.choice(WORDS, 3)) for _ in range(1 + i % 3)] for i in range(40)]
    lines = write_lines(file, ({"turns": turns} for turns in talks)).read_text().split("\n")
    file.write_text("\n".join([*lines[:20], "{broken", *lines[20:]]))
    return file


@pytest.mark.wide
def test_the_publishers_penalty_decides_the_text(model, seeds, tmp_path, capsys):
    """Unless the flag names another; a run that was started with it goes on with it only."""
    path = tmp_path / "model"
    shutil.copytree(model, path)
    (path / "generation_config.json").write_text('{"repetition_penalty": 3.0}')
    more = [
        ("theirs",),
        ("ours", "--repetition_penalty", "3"),
        ("none", "--repetition_penalty", "1"),
    ]
    for out, *flags in more:
        assert (
            distill.main(flags_for(path, tmp_path / out, seeds, "--limit=5", *flags)) == 0
        )
    theirs, ours, none = (
        (tmp_path / out / "messages.jsonl").read_text() for out, *_ in more
    )
    assert theirs == ours != none
    assert distill.main(
        flags_for(path, tmp_path / "ours", seeds, "--limit=5", *more[2][1:])
    )
    assert "was started with repetition_penalty 3.0" in capsys.readouterr().err


def test_a_run_writes_conversations_with_provenance(model, seeds, tmp_path, capsys):
    assert distill.main(flags_for(model, tmp_path, seeds)) == 0
    lines = read_lines(tmp_path / "messages.jsonl")
    assert [line["seed"] for line in lines] == [i for i in range(41) if i != 20]
    answers = [a for line in lines for a in line["answers"]]
    assert {a["finish"] for a in answers} >= {"stop", "length"}
    assert any(len(line["answers"]) > 1 for line in lines)  # several turns happen
    found = json.loads((tmp_path / "provenance.json").read_text())
    assert found["mode"] == "multi_turn" and found["seeds"] == 40
    assert found["answer_tokens"] == sum(a["tokens"] for a in answers)
    assert found["unusable_seeds"] == {}
    said = capsys.readouterr().err
    assert "1 of 41 records skipped (1 x broken JSON, first in line 21)" in said
    # What training makes of it: every usable line is a sample.
    encode = RecordEncoder(load_tokenizer(str(model)), DataConfig(format="messages"))
    used = [not encode(line).problem for line in lines]
    assert used == [bool(line["answers"]) for line in lines]
    # And which tokens it counts are those that a draft vocabulary is chosen by.
    targets = [i for line in lines for ids, own in encode(line).pieces
               for i, one in zip(ids, own) if one]  # fmt: skip
    counts = np.load(tmp_path / "vocab_counts.npy")
    np.testing.assert_array_equal(counts, np.bincount(targets, minlength=len(counts)))
    assert f"{(counts > 0).sum()} of {len(counts)} tokens occur" in said


def test_a_chat_model_answers_prompts_and_another_continues_them(
    model, directory, tmp_path, monkeypatch
):
    prompts, modes = write_lines(tmp_path / "a.jsonl", [{"prompt": "the cat"}]), []
    answer = lambda flags, mode, seeds: modes.append(mode) or 0  # noqa: E731
    monkeypatch.setattr(distill, "answer", answer)
    for path in (model, directory):
        assert distill.main(flags_for(path, tmp_path / "out", prompts)) == 0
    assert modes == ["multi_turn", "continue"]


def test_the_training_gets_the_template_of_the_answers(model, tmp_path, capsys):
    seeds = write_lines(tmp_path / "a.jsonl", [{"turns": ["the cat"]}])
    flags = flags_for(model, tmp_path / "out", seeds, "--chat_template=vicuna")
    assert distill.main(flags) == 0
    assert "--config.data.chat_template vicuna" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["multi_turn", "continue"])
def test_answers_are_on_disk_as_they_end(model, seeds, tmp_path, monkeypatch, mode):
    """Stopped inside its second batch, the run goes on after the last answer, to the same file."""
    source, name = seeds, "messages.jsonl"
    if mode == "continue":
        prompts = ({"prompt": word} for word in WORDS)
        source, name = write_lines(tmp_path / "prompts.jsonl", prompts), "samples.jsonl"
    whole, out = tmp_path / "whole", tmp_path / "out"
    more = ("--limit=8", f"--mode={mode}")
    assert distill.main(flags_for(model, whole, source, *more)) == 0
    show, counts = Writer.show, []

    def stop(self, current=0, answered=0):
        show(self, current, answered)
        counts.append(answered)
        if sum(counts) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "show", stop)
    assert distill.main(flags_for(model, out, source, *more)) == 130
    assert (out / name).read_bytes().count(b"\n") == 6
    monkeypatch.setattr(Writer, "show", show)
    answer, asked = Writer.answer, []

    def count(self, seeds, ended):
        asked.append(len(seeds))
        return answer(self, seeds, ended)

    monkeypatch.setattr(Writer, "answer", count)
    assert distill.main(flags_for(model, out, source, *more)) == 0
    assert asked == [2] and (out / name).read_bytes() == (whole / name).read_bytes()
    if mode == "continue":  # whose training set is its own text, prompts and what was said
        samples = read_lines(out / name)
        tokens, counted = np.load(out / "tokens.npy"), np.load(out / "counted.npy")
        for kind, own in (("prompt_ids", ~counted), ("token_ids", counted)):
            assert tokens[own].tolist() == [i for s in samples for i in s[kind]]
        cfg = DataConfig(seq_len=32, packing="first_fit")
        assert TokenRows(str(out), cfg, load_tokenizer(str(model)).vocab_size).rows >= 1


def test_continuations_are_counted_without_their_prompts():
    lines = [{"prompt_ids": [1, 2], "token_ids": [0, 3, 3]}]
    lines += [{"prompt_ids": [1], "token_ids": [2]}]
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=5))
    counts = files.vocab_counts("continue", lines, model, "")
    assert counts.tolist() == [1, 0, 1, 2, 0]
    counts = np.repeat([8, 1, 0], [1024, 2048, 3072])
    assert files.coverage(counts) == (
        "3072 of 6144 tokens occur; the top 2048 cover 90.00%, the top 4096 cover 100.00%"
    )


def test_a_model_that_asks_itself(model, seeds, tmp_path, capsys):
    """From nothing; user turns by their own temperature. A run with other settings is refused."""
    flags = flags_for(model, tmp_path / "x", seeds, "--temperature=0")
    flags = [f for f in flags if not f.startswith("--prompts")]
    assert distill.main(flags) == 2
    assert "either --prompts FILE or --ask N" in capsys.readouterr().err
    assert distill.main([*flags, "--ask=8", "--mode=multi_turn"]) == 2
    assert "--ask is for --mode self_talk" in capsys.readouterr().err
    flags += ["--ask=8", "--max_turns=1"]
    assert distill.main([*flags, "--user_temperature=1.5"]) == 0
    written = (tmp_path / "x" / "messages.jsonl").read_text()
    lines = written.splitlines()
    asked = [m[0]["content"] for line in lines if (m := json.loads(line)["messages"])]
    assert len(lines) == 8 and len(set(asked)) == len(asked) > 1
    assert distill.main([*flags, "--user_temperature=0.5"]) == 2
    assert "user_temperature 1.5, now it is 0.5" in capsys.readouterr().err
    assert (tmp_path / "x" / "messages.jsonl").read_text() == written


def test_a_model_that_was_retrained_in_place(seeds, tmp_path, capsys):
    """Its answers are not mixed with those that it gave before."""
    write_ending_model(tmp_path / "m")
    flags = flags_for(tmp_path / "m", tmp_path / "x", seeds)
    assert distill.main([*flags, "--limit=2"]) == 0
    write_ending_model(tmp_path / "m", seed=1)
    assert distill.main([*flags, "--limit=2"]) == 2
    assert "was started with fingerprint" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["self_talk", "continue"])
def test_twenty_kills_at_random_moments(model, tmp_path, mode):
    """SIGKILL at any moment from the start of the process on; the same files as undisturbed.

    A run that ended before its kill was due is compared, and the next one starts again.
    """
    rng = np.random.default_rng(0)
    asked = ({"prompt": " ".join(rng.choice(WORDS, 3))} for _ in range(400))
    prompts = write_lines(tmp_path / "prompts.jsonl", asked)

    def start(out):
        flags = [*flags_for(model, out, prompts), f"--mode={mode}", "--max_new_tokens=60"]
        command = [sys.executable, "-m", "medusa_jax", "distill", *flags]
        return subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)

    def content(out):
        files = (path for path in out.iterdir() if path.name != "provenance.json")
        return {path.name: path.read_bytes() for path in files}

    assert start(tmp_path / "warm").wait(300) == 0  # fills the compilation cache
    began = time.monotonic()
    assert start(tmp_path / "whole").wait(300) == 0
    seconds = time.monotonic() - began
    whole = content(tmp_path / "whole")
    name = "samples.jsonl" if mode == "continue" else "messages.jsonl"
    kills, finished, lines = 0, 0, []
    while kills < 20:
        out = tmp_path / f"broken{finished}"
        process = start(out)
        try:
            assert process.wait(rng.uniform(0, seconds)) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
            kills += 1
            there = (out / name).exists()
            lines.append((out / name).read_bytes().count(b"\n") if there else 0)
            continue
        assert content(out) == whole
        finished += 1
    out = tmp_path / f"broken{finished}"
    assert start(out).wait(300) == 0
    assert content(out) == whole
    print(f"{kills} kills, {finished + 1} files equal; lines there at each kill: {lines}")
    assert len(set(lines)) > 3, "the kills hardly met a run at work"


def test_lines_of_two_writers_are_refused(model, seeds, tmp_path, capsys):
    """Each line twice, as two processes at the same time would leave it, or without a field; the file is unchanged."""
    flags = flags_for(model, tmp_path / "out", seeds, "--limit=8", "--max_turns=1")
    assert distill.main(flags) == 0
    path = tmp_path / "out" / "messages.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    last = json.loads(lines[-1])
    bare = (last | {"answers": [{}]}, {"seed": last["seed"], "answers": last["answers"]})
    damaged = [([*lines[:4], *lines[:4], *lines[4:]], 5), ([*lines, b"x\n"], 9)]
    damaged += [([*lines[:7], json.dumps(line).encode() + b"\n"], 8) for line in bare]
    for written, bad in damaged:
        path.write_bytes(b"".join(written))
        capsys.readouterr()
        assert distill.main(flags) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"line {bad} is not the answer" in said and f"first {bad - 1} lines" in said
        assert path.read_bytes() == b"".join(written)
    # In another order, the last one cut off.
    path.write_bytes(b"".join([*lines[4:], *lines[:3], lines[3][:9]]))
    assert distill.main(flags) == 0
    assert path.read_bytes() == whole


def test_calibration_reads_answers_of_the_same_model(tokenizer, tmp_path):
    """The last answer after what the template writes before it, cut; of another model none."""
    roles = zip(("user", "assistant", "user", "assistant"), ("hi", "yes", "and", "the cat"))
    messages = [{"role": role, "content": text} for role, text in roles]
    records = [{"messages": messages}, {"messages": []}]
    records += [{"prompt_ids": [4, 5], "token_ids": [6, 7, 8]}]
    settings = {"fingerprint": "this", "chat_template": ""}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    model = SimpleNamespace(fingerprint="this", tokenizer=tokenizer)
    source = str(tmp_path / "messages.jsonl")
    talk, text = distilled_texts(model, source, records, 2)
    prompt = encode_prompt(tokenizer, messages[:3])
    whole, mask = answers.encode_conversation(tokenizer, messages)
    assert talk.prompt == prompt == whole[: len(prompt)] and mask[len(prompt)]
    assert talk.ids == whole[: len(prompt) + 2] and text == ([4, 5, 6, 7], 2)
    model.fingerprint = "another"
    assert distilled_texts(model, source, records, 2) == []


def test_settings_are_compared_at_once_and_only_those_of_the_text(tmp_path):
    """All differences in one message; none while nothing is answered; one that is missing is damage."""
    values = {"chat_template": "", "temperature": 0.3, "top_p": 1.0, "seed": 0, "max_new_tokens": 9,
              "mesh": (1,), "max_turns": 4, "batch_size": 8, "prompts": "a"}  # fmt: skip
    old = files.settings_of(values, "multi_turn", [Seed(0)], "f")
    assert old == files.settings_of(
        values | {"batch_size": 2, "prompts": "b"}, "multi_turn", [Seed(0)], "f"
    )
    new = files.settings_of(
        values | {"seed": 1, "top_p": 0.5}, "multi_turn", [Seed(1)], "g"
    )
    (tmp_path / "settings.json").write_text(json.dumps(old | {"batch_size": 8}))
    (tmp_path / "messages.jsonl").write_text("")
    files.check_settings(tmp_path, new)
    (tmp_path / "messages.jsonl").write_text("{}\n")
    files.check_settings(tmp_path, old)
    with refused(
        "fingerprint 'f', now it is 'g'; top_p 1.0, .*; seed 0, .*; seeds_sha256 "
    ):
        files.check_settings(tmp_path, new)
    del old["top_p"]
    (tmp_path / "settings.json").write_text(json.dumps(old))
    with refused("settings.json is damaged .'top_p'.: use another --out"):
        files.check_settings(tmp_path, new)
