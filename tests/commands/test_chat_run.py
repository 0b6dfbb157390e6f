"""`decode.py --chat` at the terminal: history, Ctrl-C, Ctrl-D, a context that fills up."""

import builtins
import re
import time

import jax
import pytest
from tiny import CONTEXT, write_chat_model

from medusa_jax.commands import chat
from medusa_jax.commands.chat import COMMANDS
from medusa_jax.commands.decode import main
from medusa_jax.serving import Handle, Server


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_chat_model(path)
    return path


@pytest.fixture
def talk(directory, capsys, monkeypatch):
    """Say these things (exceptions are raised); returns status, stdout, stderr and prompts."""

    def run(*said, flags=(), during=None):
        script, prompts, run.reused, run.ahead = iter(said), [], [], []
        true_submit, true_iter = Server.submit, Handle.__iter__

        def submit(self, request):
            prompts.append(self.model.tokenizer.decode(request.prompt))
            return true_submit(self, request)

        def deltas(self):
            for n, delta in enumerate(true_iter(self)):
                if during is not None and (len(prompts), n) == during:
                    raise KeyboardInterrupt
                if delta.ending:
                    run.reused.append(delta.ending.reused_tokens)
                yield delta

        def listen(_=""):
            word = next(script, EOFError())
            if isinstance(word, BaseException):
                raise word
            return word

        def warm_up(self, tokens, groups, *, wait):  # compiling would take the tests' time
            run.ahead.append((len(prompts), tokens, groups, wait))

        monkeypatch.setattr(Server, "warm_up", warm_up)
        monkeypatch.setattr(Server, "submit", submit)
        monkeypatch.setattr(Handle, "__iter__", deltas)
        monkeypatch.setattr(builtins, "input", listen)
        capsys.readouterr()
        given = ["--model", str(directory), "--drafter", str(directory / "heads")]
        given += ["--tree", "chain:2", "--max_new_tokens", "6", "--chat", *flags]
        status = main(given)
        return status, *capsys.readouterr(), prompts

    return run


def test_replies_see_the_whole_conversation(talk):
    status, out, err, prompts = talk("in", "the hat", "")
    first, second = out.splitlines()
    assert status == 0 and "Ctrl-C" in err
    assert prompts == ["uin.a", f"uin.a{first}uthe hat.a"]
    assert first and second


def test_what_was_said_before_is_not_read_again(talk):
    status, _, _, prompts = talk("the cat and the other cat in the hat", "in")
    assert status == 0 and len(prompts) == 2
    first, second = talk.reused
    assert first == 0 and second > 20


def test_commands(talk):
    for reset, end in (("/reset", "/exit"), ("/new", "/quit")):
        status, _, err, prompts = talk("/help", "in", reset, "the", end, "never said")
        assert status == 0 and prompts == ["uin.a", "uthe.a"]
        assert all(f"  {name} " in err for name in COMMANDS)
    _, _, err, prompts = talk("/rest", "/banana", "/retry", "/etc/hosts")
    assert "there is no command /rest; did you mean '/reset'?" in err
    assert "there is no command /banana (/help lists them)" in err
    assert "nothing has been asked yet" in err and len(prompts) == 1


def test_retry_answers_the_last_turn_with_other_draws(talk):
    flags = ("--temperature", "1.5", "--max_new_tokens", "20")
    status, out, _, prompts = talk("in", "a", "/retry", "/retry", flags=flags)
    replies = out.splitlines()
    assert status == 0 and len({*prompts[1:]}) == 1 and len(prompts) == 4
    assert len({*replies[-3:]}) == 3
    greedy = talk("in", "/retry")
    assert (
        len(greedy[3]) == 1 and "at temperature 0 the reply would be the same" in greedy[2]
    )


def test_a_reply_that_is_cut_says_so(talk):
    notice = "(cut at 6 tokens: ask to go on, or raise --max_new_tokens)"
    _, out, err, _ = talk("in")
    assert notice in err
    assert notice not in talk("in", flags=("--stop", out[2]))[2]


def test_drafts_are_shown_in_colour(talk):
    plain = talk("abcab", flags=("--max_new_tokens", "20"))[1]
    _, out, err, prompts = talk(
        "abcab", "a", flags=("--show_drafts", "--max_new_tokens", "20")
    )
    first = out.splitlines()[0]
    assert "\x1b[32m" in first and "accepted drafts by tree depth" in err
    assert re.sub(r"\x1b\[\d+m", "", first) == plain.splitlines()[0]
    assert "\x1b" not in prompts[1]  # nor in what the model reads of its reply


def test_what_the_next_turns_need_is_compiled_ahead(talk, monkeypatch):
    """Before the first turn, and after one that may leave the next with too little; nothing waits."""
    talk("in", "a")
    assert talk.ahead == [(0, CONTEXT, [(True, "auto")], False)]
    monkeypatch.setattr(chat, "TURN_TOKENS", 4)
    talk("in", "a", "abc " * 8)
    assert talk.ahead[0] == (0, 20, [(True, "auto")], False)
    turns, tokens, *_ = zip(*talk.ahead)
    assert turns == (0, 1, 2, 3) and list(tokens) == sorted({*tokens})
    assert tokens[-1] <= CONTEXT


@pytest.mark.wide
def test_a_second_turn_compiles_nothing(directory, capsys, monkeypatch):
    """Its prompt is of another size, and the conversation longer, than the first one's."""
    jax.clear_caches()
    compiled, servers, by_turn = [], [], []
    script = iter(["in", "the cat and the other cat in the hat"])
    made = Server.__init__

    def make(self, *args, **more):
        made(self, *args, **more)
        servers.append(self)

    def listen(_=""):
        deadline = time.monotonic() + 300
        while servers[0].warming_up and time.monotonic() < deadline:
            time.sleep(0.05)
        by_turn.append(len(compiled))
        return next(script, "/exit")

    def told(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    monkeypatch.setattr(Server, "__init__", make)
    monkeypatch.setattr(builtins, "input", listen)
    jax.monitoring.register_event_duration_secs_listener(told)
    try:
        given = ["--model", str(directory), "--drafter", str(directory / "heads")]
        given += ["--tree", "chain:2", "--max_new_tokens", "6", "--chat"]
        assert main(given) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(told)
    first, second, end = by_turn
    assert first > 0 and end == second, by_turn


def test_ctrl_c_stops_the_reply_and_not_the_chat(talk):
    whole = talk("in")[1].splitlines()[0]
    status, out, err, prompts = talk("in", "the", during=(1, 1))
    # What had been shown before stays part of the conversation.
    assert len(prompts) == 2
    shown = prompts[1].removeprefix("uin.a").removesuffix("uthe.a")
    assert status == 0 and "(stopped)" in err
    assert shown and out.startswith(shown) and whole.startswith(shown) and shown != whole


def test_ctrl_c_at_the_prompt_goes_on(talk):
    status, _, err, prompts = talk(KeyboardInterrupt(), "in")
    assert status == 0 and prompts == ["uin.a"] and err.count("Ctrl-D") == 2


def test_old_turns_are_forgotten_when_the_context_is_full(talk):
    long = "abc " * 8  # about 16 tokens
    status, _, err, prompts = talk(*[long + str(i) for i in range(8)])
    assert status == 0 and "oldest turns are forgotten" in err
    assert len(prompts) == 8 and all(len(p) < 2 * CONTEXT for p in prompts)


def test_a_turn_that_cannot_fit_is_refused_and_the_chat_goes_on(talk):
    status, _, err, prompts = talk("d" * 200, "in")
    assert status == 0 and "shorten it" in err and prompts == ["uin.a"]
