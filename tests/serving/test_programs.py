"""Programs that are not ready: who waits for them, and who does not."""

import threading
import time

import pytest
from live import compilations
from served import alone, until
from tiny import write_model

import medusa_jax
from medusa_jax import Options, Tree
from medusa_jax.serving import Request, Server, batch, programs
from medusa_jax.serving.job import BASE, Group
from medusa_jax.serving.programs import Compiler, NotCompiled, Programs


class Recorded:
    """A batch that notes what is compiled on it, and waits until it may."""

    def __init__(self):
        self.begun, self.done, self.may = [], [], threading.Semaphore(0)

    def compile(self, *asked):
        self.begun.append(Programs(*asked))
        self.may.acquire()
        self.done.append(Programs(*asked))


def test_who_waits_comes_before_what_is_planned():
    recorded = Recorded()
    compiler = Compiler(lambda: recorded, lambda: None)
    first, second, third = (Programs(BASE, n, 128) for n in (1, 2, 4))
    wanted = Programs(Group(False), 1, 128)
    compiler.plan([first, second, third])
    until(lambda: recorded.begun == [first])
    assert not compiler.ready(wanted) and not compiler.ready(second)
    for _ in range(4):
        recorded.may.release()
    compiler.wait()
    until(lambda: compiler.known(third))
    # Ordinary requests first: others must not keep them waiting with what only they need.
    assert recorded.done == [first, second, wanted, third]
    assert compiler.ready(wanted)
    compiler.close()


def test_planned_programs_wait_until_the_server_is_idle(capfd):
    """And are logged, as are those that a call waits for."""
    recorded, busy = Recorded(), [True]
    compiler = Compiler(lambda: recorded, lambda: None, lambda: not busy[0])
    first, wanted = Programs(BASE, 1, 128), Programs(Group(True, logprobs=True), 1, 128)
    for _ in range(2):
        recorded.may.release()
    compiler.plan([first])
    assert not compiler.ready(wanted)
    until(lambda: compiler.known(wanted))
    time.sleep(0.05)
    assert recorded.done == [wanted]
    busy[0] = False
    compiler.look_again()
    compiler.wait()
    assert recorded.done == [wanted, first]
    compiler.close()
    said = capfd.readouterr().err
    assert "compiling, a call waits: drafts, logprobs; 1 x 128 tokens" in said
    assert "compiled in 0.0 s: drafts, logprobs" in said and "drafts; 1 x 128" not in said


def test_what_failed_is_tried_again_later(monkeypatch):
    def no_batch():
        raise MemoryError("no memory")

    compiler, asked = Compiler(no_batch, lambda: None), Programs(BASE, 1, 128)

    def fails():
        try:
            return compiler.ready(asked)
        except NotCompiled as error:
            return str(error) == "no memory"

    until(fails)
    compiler._make_batch = Recorded
    monkeypatch.setattr(Recorded, "compile", lambda *asked: None)
    monkeypatch.setattr(programs, "RETRY_SECONDS", 0.0)
    until(lambda: compiler.ready(asked))
    compiler.close()


@pytest.mark.wide
def test_nothing_is_compiled_where_others_are_served(tmp_path, monkeypatch):
    """Calls that need programs of their own, while a victim is answered again and again: the serving
    thread compiles nothing."""
    monkeypatch.setattr(batch, "LEAST_SLOTS", 128)
    tree = Tree.from_choices([[0], [1], [2], [0, 1]])  # no other test has its programs
    write_model(tmp_path, max_position=400)
    model = medusa_jax.load(str(tmp_path), str(tmp_path / "heads"), tree=tree)
    said, attacks, over = [], [], threading.Event()

    def victim(server):
        while not over.is_set():
            [*_, last] = server.submit(Request("in", Options(max_new_tokens=40)))
            said.append(last.ending.result.text)

    attackers = [
        Request("the", Options(max_new_tokens=8, logprobs=1)),
        Request("the", Options(max_new_tokens=8), acceptance="typical"),
        Request("the", Options(max_new_tokens=8), acceptance="rejection"),
        Request("the", Options(max_new_tokens=8), drafts=False),
        Request("the", Options(max_new_tokens=200)),
        Request("the cat and in the hat, " * 9, Options(max_new_tokens=8)),
    ]
    with Server(model, slots=2, trees={1: tree, 2: tree}) as server:
        server.warm_up(60, [BASE])
        list(server.submit(Request("in", Options(max_new_tokens=40))))
        with compilations() as compiled:
            thread = threading.Thread(target=victim, args=[server])
            thread.start()
            for request in attackers:
                [*_, last] = server.submit(request)
                attacks.append(last.ending.result.token_ids)
            over.set()
            thread.join()
    assert {name.partition("_")[0] for name in compiled} == {"compiling"}
    assert set(said) == {alone(model, "in", max_new_tokens=40).text}
    for request, ids in zip(attackers, attacks):
        if request.acceptance == "auto":
            options = {"max_new_tokens": request.options.max_new_tokens}
            assert ids == alone(model, request.prompt, **options).token_ids
