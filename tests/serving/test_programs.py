"""Programs that are not ready: who waits for them, and who does not."""

import random
import threading
import time

import jax
import pytest
from fake_batch import FakeBatch
from served import alone
from test_turns import PIECE, TREES, Client
from tiny import write_model

import medusa_jax
from medusa_jax import Options, Tree
from medusa_jax.serving import Request, Server, batch, programs, room, scheduler
from medusa_jax.serving.job import BASE, Group
from medusa_jax.serving.programs import Compiler, NotCompiled, Programs

RULES = ("auto", "auto", "typical", "rejection")


class Delayed:
    """Programs that are ready some turns after they were asked for."""

    def __init__(self, rng, most_turns):
        self.rng, self.most_turns, self.left, self.failing = rng, most_turns, {}, set()

    def ready(self, asked):
        if asked in self.failing:
            raise NotCompiled("out of memory")
        self.left.setdefault(asked, self.rng.randrange(1, self.most_turns))
        return self.known(asked)

    def known(self, asked):
        return self.left.get(asked, 1) <= 0

    def a_turn_later(self):
        self.left = {asked: left - 1 for asked, left in self.left.items()}


class StrictBatch(FakeBatch):
    """Complains where something runs that is not ready."""

    known = None

    def check(self, group):
        assert self.known(Programs(group, self.rows, self.slots))

    def read(self, reading):
        self.check(reading.group)
        super().read(reading)

    def run(self, wanted_B, group, steps, few, guides=()):
        self.check(group)
        return super().run(wanted_B, group, steps, few)


def turns_with(programs, monkeypatch, trees=TREES):
    monkeypatch.setattr(scheduler, "Batch", StrictBatch)
    monkeypatch.setattr(StrictBatch, "known", staticmethod(programs.known))
    return scheduler.Scheduler(
        None, trees=trees, most_new=300, chunk_steps=3, piece=PIECE, programs=programs
    )


def finish(turns, programs):
    for _ in range(5000):
        programs.a_turn_later()
        if not turns.step() and not turns.busy and not turns.waiting:
            return
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(12))
def test_no_text_depends_on_what_is_ready(seed, monkeypatch):
    """Requests of all kinds come while programs are compiled; texts outgrow the cache."""
    monkeypatch.setattr(room, "PATIENCE", [3, 64][seed % 2])
    rng, clients = random.Random(seed), []
    compiled = Delayed(rng, 60)
    turns, parked = turns_with(compiled, monkeypatch), 0
    for _ in range(200):
        if rng.random() < 0.2:
            prompt = [rng.randrange(9)] * rng.randrange(1, 50)
            fields = {"logprobs": rng.choice([None, None, None, 2])}
            rule, drafts = rng.choice(RULES), rng.random() < 0.7
            n = rng.choice([1, 5, 20, 60])
            clients.append(Client(turns, prompt, n, drafts, rule, **fields))
        if clients and rng.random() < 0.03:
            rng.choice(clients[-4:]).handle.cancel()
        turns.step()
        parked += bool(turns._parked)
        compiled.a_turn_later()
    finish(turns, compiled)
    assert parked
    for client in clients:
        if not client.handle.cancelled:
            client.check()


def all_of(group, slots):
    return {Programs(group, rows, slots): 0 for rows in TREES}


def test_nobody_waits_for_another_ones_programs(monkeypatch):
    """Neither for a place, nor for the next step: whatever else is asked for meanwhile."""
    compiled = Delayed(random.Random(0), 2)
    compiled.left = all_of(BASE, 32)
    turns = turns_with(compiled, monkeypatch)
    compiled.most_turns = 10**6
    victim = Client(turns, [3], 25)
    others = [
        Client(turns, [4], 9, acceptance="typical"),
        Client(turns, [4], 9, drafts=False),
        Client(turns, [4], 9, logprobs=1),
        Client(turns, [4] * 60, 9),
        Client(turns, [5], 200),  # outgrows the slots
    ]
    second = Client(turns, [6], 25)
    for _ in range(40):
        turns.step()
    victim.check()
    second.check()
    assert [client.ended for client in others] == [False] * 5
    compiled.most_turns, compiled.left = 2, dict.fromkeys(compiled.left, 1)
    finish(turns, compiled)
    for client in others:
        client.check()


def test_a_request_without_programs_is_told(monkeypatch):
    compiled = Delayed(random.Random(0), 2)
    compiled.left = all_of(BASE, 32)
    compiled.failing = {Programs(Group(True, "typical"), 1, 32), Programs(BASE, 1, 64)}
    turns = turns_with(compiled, monkeypatch, {1: Tree.chain(3)})
    lost = [Client(turns, [4], 9, acceptance="typical"), Client(turns, [5], 200)]
    lost.append(Client(turns, [6] * 50, 9))
    answered = Client(turns, [3], 9)
    finish(turns, compiled)
    answered.check()
    for client in lost:
        assert "out of memory" in str(client.deltas[-1])


class Recorded:
    """A batch that notes what is compiled on it, and waits until it may."""

    def __init__(self):
        self.done, self.may = [], threading.Semaphore(0)

    def compile(self, *asked):
        self.may.acquire()
        self.done.append(Programs(*asked))


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_who_waits_comes_before_what_is_planned():
    recorded = Recorded()
    compiler = Compiler(lambda: recorded, lambda: None)
    first, second, third = (Programs(BASE, n, 128) for n in (1, 2, 4))
    wanted = Programs(Group(False), 1, 128)
    compiler.plan([first, second, third])
    wait_until(lambda: compiler._now == first)
    assert not compiler.ready(wanted) and not compiler.ready(second)
    for _ in range(4):
        recorded.may.release()
    compiler.wait()
    wait_until(lambda: compiler.known(third))
    # Ordinary requests first: others must not keep them waiting with what only they need.
    assert recorded.done == [first, second, wanted, third]
    assert compiler.ready(wanted) and not compiler.planned
    compiler.close()


def test_what_failed_is_tried_again_later(monkeypatch):
    def no_batch():
        raise MemoryError("no memory")

    compiler, asked = Compiler(no_batch, lambda: None), Programs(BASE, 1, 128)

    def fails():
        try:
            return compiler.ready(asked)
        except NotCompiled as error:
            return str(error) == "no memory"

    wait_until(fails)
    compiler._make_batch = Recorded
    monkeypatch.setattr(Recorded, "compile", lambda *asked: None)
    monkeypatch.setattr(programs, "RETRY_SECONDS", 0.0)
    wait_until(lambda: compiler.ready(asked))
    compiler.close()


@pytest.mark.wide
def test_nothing_is_compiled_where_others_are_served(tmp_path, monkeypatch):
    """Calls that need programs of their own, while a victim is answered again and again: the serving
    thread compiles nothing."""
    monkeypatch.setattr(batch, "LEAST_SLOTS", 128)
    tree = Tree.from_choices([[0], [1], [2], [0, 1]])  # no other test has its programs
    write_model(tmp_path, max_position=400)
    model = medusa_jax.load(str(tmp_path), str(tmp_path / "heads"), tree=tree)
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(threading.current_thread().name)

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
        server.warm_up(60, [(True, "auto")])
        list(server.submit(Request("in", Options(max_new_tokens=40))))
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            thread = threading.Thread(target=victim, args=[server])
            thread.start()
            for request in attackers:
                [*_, last] = server.submit(request)
                attacks.append(last.ending.result.token_ids)
            over.set()
            thread.join()
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert {*compiled} == {"compiling"}
    assert set(said) == {alone(model, "in", max_new_tokens=40).text}
    for request, ids in zip(attackers, attacks):
        if request.acceptance == "auto":
            options = {"max_new_tokens": request.options.max_new_tokens}
            assert ids == alone(model, request.prompt, **options).token_ids
