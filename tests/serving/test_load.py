"""Many clients at once: each answer equals a solo run's, none is lost, no slot leaks. While programs compile, only
the requests that need them wait."""

import gc
import json
import random
import resource
import sys
import threading
import time
from pathlib import Path

import children
import clients
import jax
import pytest
from live import compilations
from served import TREE, alone, listening, until
from tiny import write_model

import medusa_jax
from medusa_jax import Options, Tree
from medusa_jax.serving import Request, Server, batch, programs
from medusa_jax.serving.job import BASE, Group, Job
from medusa_jax.serving.programs import Compiler, NotCompiled, Programs, ScoringPrograms

PROMPTS = ["in", "the cat and", "abcab, a hat.\n", "in the hat, the cat", "a", "hat " * 9]
# As many rows as a static batch has; calls of the long run; rounds of a comparison, calls of each.
SLOTS = 8
CALLS = 2000


def kinds(prompts, limits):
    """Calls that come again and again, so that few solo runs tell what all should say."""
    rng = random.Random(0)

    def call(prompt):
        limit, temperature = rng.choice(limits), rng.choice([0, 0, 0.8])
        drawn = {"temperature": temperature, "seed": rng.randrange(99)}
        return {"prompt": prompt, "max_tokens": limit} | drawn

    return [call(prompt) for prompt in prompts for _ in range(4)]


def expected_texts(model, asked):
    """Solo runs, by a batch of fixed rows (`tests/decoding/test_exactness.py`)."""
    prompts, ids = [a["prompt"] for a in asked], [0] * len(asked)
    options = [Options(a["max_tokens"], a["temperature"], seed=a["seed"]) for a in asked]
    results = model.generate(prompts, options, ids, tree="none")
    return [result.text for result in results]


@pytest.mark.wide
def test_some_clients_at_once(port):
    asked = kinds(PROMPTS, [1, 7, 30])
    expected = expected_texts(port.model, asked)
    done = clients.attack(port.url, 8, 60, asked, 0.005)
    assert len(done["answers"]) == 60
    assert all(text == expected[kind] for kind, text in done["answers"])
    assert len({kind for kind, _ in done["answers"]}) > 15


@pytest.mark.wide
def test_nothing_is_compiled_in_steady_state(port):
    """Once warm, texts of any length, arrival and parameters run the same programs.

    A new server: those of an older one may have been dropped after another module's tests.
    """
    asked = kinds(PROMPTS, [1, 3, 11, 25, 40])
    for fields in asked[::3]:
        fields["drafts"] = False
    with Server(port.model, slots=3, trees={3: TREE}) as server, listening(server) as own:
        server.warm_up(95, [BASE, Group(drafts=False)])
        with compilations() as compiled:
            clients.attack(own.url, 4, 40, asked, 0.0)
    assert compiled == []


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n_clients", [8, 64])
def test_two_thousand_requests(n_clients, tmp_path, capsys):
    """In float64, where texts are equal without exception; with drafts and without, at any time."""
    write_model(tmp_path, max_position=300)
    files = str(tmp_path), str(tmp_path / "heads")
    model = medusa_jax.load(*files, tree=TREE, dtype="float64")
    asked = kinds([*PROMPTS, "the cat and in the hat, " * 8], [2, 20, 90])
    for fields in asked[::3]:
        fields["drafts"] = False
    expected = expected_texts(model, asked)
    trees = {2: TREE, SLOTS: Tree.chain(2)}
    with Server(model, slots=SLOTS, trees=trees) as server, listening(server) as port:
        port.server.warm_up(model.config.max_position, [BASE, Group(drafts=False)])
        apart(port.url, n_clients, 300, asked, 0.05)
        port.wait_idle()
        before, memory = alive(), resident()
        done = apart(port.url, n_clients, CALLS, asked, 0.05)
        port.wait_idle()
        grown, after = resident() - memory, alive()  # which takes memory itself
    wrong = sum(text != expected[kind] for kind, text in done["answers"])
    with capsys.disabled():
        print(
            f"\n{n_clients} clients, {len(done['answers'])} answers of {CALLS}, {wrong} differ "
            f"from their solo runs, {done['tokens']} tokens, {grown / 2**20:.1f} MiB more memory"
        )
    assert len(done["answers"]) == CALLS and not wrong
    assert after == before
    assert grown < 16 * 2**20


def alive():
    """How many requests and device arrays are still held."""
    gc.collect()
    jobs = sum(isinstance(thing, Job) for thing in gc.get_objects())
    return jobs, len(jax.live_arrays())


def resident():
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def apart(url, n_clients, n_calls, asked, pause):
    """`clients.attack` from a separate process."""
    given = json.dumps([url, n_clients, n_calls, asked, pause])
    command = (sys.executable, clients.__file__)
    return json.loads(children.output_of(command=command, stdin=given))


class Recorded:
    """A batch that records each compilation and starts it only when the test lets it."""

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
    wanted = Programs(Group(drafts=False), 1, 128)
    compiler.plan([first, second, third])
    until(lambda: recorded.begun == [first])
    assert not compiler.ready_or_queue(wanted) and not compiler.ready_or_queue(second)
    for _ in range(4):
        recorded.may.release()
    compiler.wait()
    until(lambda: compiler.is_ready(third))
    # Ordinary requests first: others must not keep them waiting with what only they need.
    assert recorded.done == [first, second, wanted, third]
    assert compiler.ready_or_queue(wanted)
    compiler.close()


def test_small_sizes_and_likely_groups_are_planned_first(port, monkeypatch):
    planned, plain = [], Group(drafts=False)
    monkeypatch.setattr(port.server._compiler, "plan", planned.extend)
    monkeypatch.setattr(port.server, "_trees", {3: TREE, 1: TREE})
    port.server.warm_up(9, [BASE, plain], wait=False)
    first = [Programs(BASE, 1, 512), Programs(plain, 1, 512), Programs(BASE, 3, 512)]
    assert planned == [*first, ScoringPrograms(512), Programs(plain, 3, 512)]


def test_planned_programs_wait_until_the_server_is_idle(capfd):
    """And are logged, as are those that a call waits for."""
    recorded, busy = Recorded(), [True]
    compiler = Compiler(lambda: recorded, lambda: None, lambda: not busy[0])
    first, wanted = Programs(BASE, 1, 128), Programs(Group(logprobs=True), 1, 128)
    for _ in range(2):
        recorded.may.release()
    compiler.plan([first])
    assert not compiler.ready_or_queue(wanted)
    until(lambda: compiler.is_ready(wanted))
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
            return compiler.ready_or_queue(asked)
        except NotCompiled as error:
            return str(error) == "no memory"

    until(fails)
    compiler._make_batch = Recorded
    monkeypatch.setattr(Recorded, "compile", lambda *asked: None)
    monkeypatch.setattr(programs, "RETRY_SECONDS", 0.0)
    until(lambda: compiler.ready_or_queue(asked))
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
