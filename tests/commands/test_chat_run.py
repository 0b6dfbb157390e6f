"""`decode.py --chat` at the terminal: history, Ctrl-C, Ctrl-D, a context that fills up."""

import builtins
import dataclasses
import itertools
import json
import re

import jax
import numpy as np
import pytest
from cases import wide
from live import compilations
from tiny import CONTEXT

from medusa_jax.api import Options, load, text_stream
from medusa_jax.api.dialogue import Dialogue
from medusa_jax.commands.chat import COMMANDS, Chat
from medusa_jax.commands.decode import main
from medusa_jax.constraints.host_work import RowWork
from medusa_jax.errors import UserError
from medusa_jax.learning.learner import Learner
from medusa_jax.text.tokenizer import load_tokenizer


def flags_of(chatty):
    given = ["--model", str(chatty), "--drafter", str(chatty / "heads")]
    return [*given, "--tree", "chain:2", "--max_new_tokens", "6", "--chat"]


@pytest.fixture
def talk(chatty, capsys, monkeypatch):
    """Say these things (exceptions are raised); returns status, stdout, stderr and prompts."""

    def run(*said, flags=(), during=None):
        script, prompts, run.reused = iter(said), [], []
        stream = Dialogue.stream

        def chunks(self, prompt, *args, **more):
            prompts.append(self.model.tokenizer.decode(prompt))
            for n, chunk in enumerate(stream(self, prompt, *args, **more)):
                if during is not None and (len(prompts), n) == during:
                    raise KeyboardInterrupt
                if chunk[1]:
                    run.reused.append(self.reused)
                yield chunk

        def listen(_=""):
            word = next(script, EOFError())
            if isinstance(word, BaseException):
                raise word
            return word

        monkeypatch.setattr(Chat, "compile", lambda self: None)
        monkeypatch.setattr(Dialogue, "stream", chunks)
        monkeypatch.setattr(builtins, "input", listen)
        capsys.readouterr()
        status = main([*flags_of(chatty), *flags])
        return status, *capsys.readouterr(), prompts

    return run


def test_replies_see_the_whole_conversation(talk):
    status, out, err, prompts = talk("in", "the hat", "")
    first, second = out.splitlines()
    assert status == 0 and "Ctrl-C" in err
    assert len(re.findall(r"\(6 tokens, \d+ tokens/s, \d\.\d\d tokens a step", err)) == 2
    assert prompts == ["uin.a", f"uin.a{first}uthe hat.a"]
    assert first and second


def test_commands(talk):
    for reset, end in (("/reset", "/exit"), ("/new", "/quit")):
        status, _, err, prompts = talk("/help", "in", reset, "the", end, "never said")
        assert status == 0 and prompts == ["uin.a", "uthe.a"]
        assert all(f"  {usage} " in err for usage in COMMANDS)


def test_a_line_that_begins_with_a_slash_and_a_word_is_no_message(talk, tmp_path):
    said = ["/rest", "/etc/hosts is a file", "/retry", "/tree", "/tree x"]
    said += ["/temperature -1", "/stats now", "/save a.jsonl", f"/save {tmp_path}", "//in"]
    _, _, err, prompts = talk(*said)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 9 and prompts == ["uin.a"]  # the vocabulary has no slash
    assert "there is no command /rest; did you mean '/reset'?" in lines[0]
    assert "no command /etc/hosts" in lines[1] and "/save" in lines[1]


def test_another_tree_may_be_deeper(talk):
    _, _, err, _ = talk("/tree chain:3", "in", "/stats")
    assert "error" not in err and ", 4 nodes, " in err


def test_settings_figures_and_a_saved_conversation(talk, chatty, tmp_path):
    file = tmp_path / "talk.jsonl"
    said = ["in", "/tree none", "/temperature 1.5", "the", "/stats", f"/save {file}"]
    _, out, err, prompts = talk(*said)
    first, second = out.splitlines()
    assert "12 tokens" in err and "; none, 1 nodes, temperature 1.5; 2 turns, " in err
    encode = load_tokenizer(str(chatty)).encode
    # The first reply ends with a token that is not shown.
    tokens = len(encode(prompts[-1], add_bos=True)) + 1 + len(encode(second))
    assert f", {tokens} of {CONTEXT} tokens" in err
    roles = ["user", "assistant"] * 2
    saved = [
        {"role": role, "content": text}
        for role, text in zip(roles, ["in", first, "the", second])
    ]
    assert json.loads(file.read_text()) == {"messages": saved}


def test_heads_learn_while_the_user_types(talk, tmp_path, monkeypatch, capsys):
    learned, flags = [], ("--learn", str(tmp_path))
    monkeypatch.setattr(Learner, "work", lambda self: itertools.repeat(False))
    monkeypatch.setattr(Learner, "add", lambda self, *text: learned.append(text))
    status = talk("in", "the hat", flags=flags)[0]
    assert status == 0 and [len(answer) for _, answer in learned] == [6, 6]
    assert len(learned[1][0]) > len(learned[0][0])
    ended = text_stream.results_of

    def broken(*given):
        return [dataclasses.replace(r, finish_reason="error") for r in ended(*given)]

    monkeypatch.setattr(text_stream, "results_of", broken)
    assert talk("in", flags=flags)[0] == 0 and len(learned) == 2
    assert main(["--prompt", "a", *flags]) == 2
    assert "--learn is for conversations" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--json", "--compare"])
def test_flags_of_a_text_are_refused(name, capsys):
    assert main(["--chat", name]) == 2
    assert f"{name} is not for conversations" in capsys.readouterr().err


def test_a_reply_without_a_word_is_dropped(talk):
    """A stop at once, or Ctrl-C before the first word: later prompts do not have the turn."""
    first = talk("in")[1][0]
    _, _, err, prompts = talk("in", "the", flags=("--stop", first))
    assert "(the model ended at once)" in err and prompts == ["uin.a", "uthe.a"]
    _, _, err, prompts = talk("in", "the", during=(1, 0))
    assert "(stopped)" in err and prompts == ["uin.a", "uthe.a"]


def test_retry_answers_the_last_turn_with_other_draws(talk):
    flags = ("--temperature", "1.5", "--max_new_tokens", "20")
    status, out, _, prompts = talk("in", "a", "/retry", "/retry", flags=flags)
    replies = out.splitlines()
    assert status == 0 and len({*prompts[1:]}) == 1 and len(prompts) == 4
    assert len({*replies[-3:]}) == 3
    greedy = talk("in", "/retry")
    assert len(greedy[3]) == 1 and "at temperature 0" in greedy[2]
    *_, prompts = talk("in", "/retry", "/retry", during=(1, 1))
    assert prompts == ["uin.a"] * 2  # the first one was stopped


def test_a_retry_without_an_answer_keeps_the_last_one(talk):
    """Stopped before its first word, or of a turn that is too long: nothing is lost."""
    flags = ("--temperature", "1.5")
    said = "in", "/retry", "the", "d" * 200, "/retry", "a"
    status, out, err, prompts = talk(*said, during=(2, 0), flags=flags)
    first, _, third, _ = out.split("\n")[:4]
    assert status == 0 and err.count("shorten it") == 2
    assert prompts[2:] == [f"uin.a{first}uthe.a", f"uin.a{first}uthe.a{third}ua.a"]


@pytest.mark.parametrize("rule", ["auto", *wide("typical")])
def test_a_kept_cache_changes_no_text(chatty, rule):
    """Follow-ups, other texts and a stopped answer: all as if every prompt was read alone."""
    model = load(str(chatty), str(chatty / "heads"), tree="chain:2")
    rng, dialogue, text = np.random.default_rng(0), Dialogue(model), []
    options = Options(max_new_tokens=8, eos_ids=(), temperature=0.7, seed=3)
    for turn in range(6):
        text = [] if turn == 3 else text
        prompt = [*text, *rng.integers(5, 20, 5).tolist()]
        if turn == 2:  # the caller loses interest
            next(dialogue.stream(prompt, options, acceptance=rule))
            continue
        *_, (_, [result]) = dialogue.stream(prompt, options, acceptance=rule)
        [alone] = model.generate([prompt], options, acceptance=rule)
        assert result.token_ids == alone.token_ids
        assert bool(dialogue.reused) == (turn not in (0, 3))
        text = prompt + result.token_ids


def test_a_constraint_that_fails_costs_one_turn(chatty, monkeypatch):
    """It fails after the backbone's pass, which has consumed the cache."""
    pytest.importorskip("llguidance")
    model = load(str(chatty), str(chatty / "heads"), tree="chain:2")
    options = Options(max_new_tokens=8, constraint={"regex": "[a-z]{20}"})
    dialogue, prompt = Dialogue(model), [5, 6, 7, 8]
    *_, (_, [expected]) = dialogue.stream(prompt, options)
    with monkeypatch.context() as patched:
        fill, steps = RowWork.fill, []

        def second_fails(self):
            steps.append(self)
            if len(steps) == 2:
                raise UserError("too costly")
            fill(self)

        patched.setattr(RowWork, "fill", second_fails)
        with pytest.raises(UserError, match="too costly"):
            list(dialogue.stream(prompt, options))
    *_, (_, [result]) = dialogue.stream(prompt, options)
    assert result.token_ids == expected.token_ids


def test_a_second_turn_compiles_nothing(chatty, capsys, monkeypatch):
    """Its prompt is of another size, and the conversation longer, than the first one's."""
    jax.clear_caches()
    by_turn = []
    script = iter(["in", "the cat and the other cat in the hat"])

    def listen(_=""):
        by_turn.append(len(compiled))
        return next(script, "/exit")

    monkeypatch.setattr(builtins, "input", listen)
    with compilations() as compiled:
        assert main(flags_of(chatty)) == 0
    _, second, end = by_turn
    assert end == second > 0, by_turn


def test_ctrl_c_stops_the_reply_and_not_the_chat(talk):
    whole = talk("in")[1].splitlines()[0]
    status, out, err, prompts = talk("in", KeyboardInterrupt(), "the", during=(1, 1))
    # What had been shown before stays part of the conversation.
    assert len(prompts) == 2
    shown = prompts[1].removeprefix("uin.a").removesuffix("uthe.a")
    assert status == 0 and "(stopped)" in err
    assert shown and out.startswith(shown) and whole.startswith(shown) and shown != whole


def test_old_turns_are_forgotten_when_the_context_is_full(talk):
    long = "abc " * 8  # about 16 tokens
    status, _, err, prompts = talk(*[long + str(i) for i in range(8)])
    assert status == 0 and "oldest turns are forgotten" in err
    assert len(prompts) == 8 and all(len(p) < 2 * CONTEXT for p in prompts)
