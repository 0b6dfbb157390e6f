"""Who gets which row and when; programs that are not ready; a device that fails."""

import random
from itertools import pairwise
from types import SimpleNamespace

import jax
import pytest
import turns
from turns import TREES, Client, Delayed, InPlace, alone, check, finish, run

from medusa_jax import Options, Tree
from medusa_jax.serving import Request, Stopped, batch, batch_size, chunks
from medusa_jax.serving.job import BASE, Group
from medusa_jax.serving.ladder import PACE
from medusa_jax.serving.programs import Programs

pytestmark = pytest.mark.usefixtures("x64")
SLOTS = 128  # of the smallest cache, so that texts outgrow it
STARTS = ["in the hat", "the cat and in the hat, " * 5, "abc"]


@pytest.fixture
def make(model, monkeypatch):
    """A scheduler with these programs, which complains where something runs that is not ready."""
    monkeypatch.setattr(batch, "LEAST_SLOTS", SLOTS)

    def make(programs=None, trees=TREES):
        made = turns.scheduler_of(model, trees, programs or InPlace())
        device = made._batch

        def checked(true):
            def call(*given):
                group = getattr(given[0], "group", None) or given[1]
                is_ready = made._size.compiler.is_ready
                assert is_ready(Programs(group, device.rows, device.slots, *given[5:]))
                return true(*given)

            return call

        for name in ("read", "run"):
            monkeypatch.setattr(device, name, checked(getattr(device, name)))
        return made

    return make


@pytest.fixture(scope="module")
def pool(model):
    """Requests that come again and again, with their solo results; half go on where another ended."""
    jax.config.update("jax_enable_x64", True)
    rng, asked = random.Random(0), []
    for i in range(12):
        limit, temperature = rng.choice([1, 5, 20, 60, 90]), rng.choice([0, 0.8])
        options = Options(limit, temperature, seed=i)
        prompt = rng.choice(STARTS)[: rng.randrange(3, 120)]
        drafts = rng.random() < 0.7
        asked.append(Request(model.encode(prompt), options, i % 3, drafts))
    results = alone(model, asked)
    for i, result in enumerate(results):
        prompt = [*asked[i].prompt, *result.token_ids, 5]
        asked.append(Request(prompt, Options(20, seed=i), i, drafts=rng.random() < 0.7))
    return list(zip(asked, results + alone(model, asked[12:])))


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_and_goes(model, make, pool, seed, monkeypatch):
    """Texts are those of solo runs, whatever programs are ready and whoever leaves; no start is taken for another."""
    monkeypatch.setattr(batch_size, "ROOMY_TURNS", [3, 64][seed % 2])
    rng, clients = random.Random(seed), []
    programs = Delayed(rng, 60 if seed > 1 else 2)
    taken = make(programs)
    for _ in range(150):
        if rng.random() < 0.2:
            request, expected = rng.choice(pool)
            clients.append((Client(taken, model, request), expected))
        if clients and rng.random() < 0.03:
            rng.choice(clients[-4:])[0].handle.cancel()
        taken.step()
        programs.a_turn_later()
        answered = [row.job for row in taken._jobs.rows if row.job]
        assert not any(job.handle.cancelled for job in answered)
    finish(taken, programs)
    for client, expected in clients:
        if not client.handle.cancelled:
            client.check(expected)
    # Whatever the rows went through, a long text goes on from theirs.
    n = max(range(12), key=lambda n: len(pool[n][1].token_ids) * pool[n][0].drafts)
    for request, expected in (pool[n], pool[n + 12]):
        last = Client(taken, model, request)
        finish(taken, programs)
        last.check(expected)
    assert last.deltas[-1].ending.reused_tokens > len(pool[n][0].prompt)


def asked(prompt, n, **fields):
    return Request([5] * prompt, Options(n), **fields)


@pytest.mark.wide
def test_nobody_waits_for_another_ones_programs(model, make):
    """Neither for a place, nor for the next step: whatever else is asked for meanwhile."""
    programs = Delayed(random.Random(0), 2)
    programs.left = {Programs(BASE, rows, SLOTS): 0 for rows in TREES}
    programs.most_turns = 10**6
    taken = make(programs)
    victims = [Client(taken, model, asked(3, 25))]
    others = [
        Client(taken, model, asked(3, 9, drafts=False)),
        Client(taken, model, asked(200, 9)),
        Client(taken, model, asked(3, 200)),  # outgrows the slots
    ]
    victims.append(Client(taken, model, asked(4, 25)))
    for _ in range(150):
        taken.step()
    check(model, victims)
    assert [client.ended for client in others] == [False] * 3 and taken._jobs.parked
    programs.most_turns, programs.left = 2, dict.fromkeys(programs.left, 1)
    finish(taken, programs)
    check(model, others)


def test_a_request_without_programs_is_told(model, make):
    programs = Delayed(random.Random(0), 2)
    programs.left = {Programs(BASE, 2, SLOTS): 0}
    failing = [(Group(rule="typical"), 2, SLOTS), (BASE, 2, 2 * SLOTS)]
    programs.failing = {Programs(*one) for one in failing}
    taken = make(programs, {2: turns.TREE})
    lost = [asked(3, 9, acceptance="typical"), asked(3, 200), asked(150, 9)]
    lost = [Client(taken, model, request) for request in lost]
    answered = Client(taken, model, asked(3, 9))
    finish(taken, programs)
    check(model, [answered])
    for client in lost:
        assert "out of memory" in str(client.deltas[-1])


@pytest.mark.parametrize("step", [0.001, 0.03, 0.2])
def test_pieces_come_at_a_steady_pace(model, make, step, monkeypatch):
    """Slow steps are shown one by one, fast ones together: no more often than a reader can see."""
    now, came, taken = [1.0], [], make()
    taken._chunks.most_steps = 8
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(chunks, "time", clock)
    client = Client(taken, model, asked(3, 200))
    deliver = taken._chunks.deliver_oldest

    def delayed():
        pending = taken._chunks.pending[0]
        steps_B = pending.progress.steps_B
        now[0] += step * (int(steps_B[client.job.row]) - client.job.steps_seen)
        deliver()

    monkeypatch.setattr(taken._chunks, "deliver_oldest", delayed)
    while not client.ended:
        taken.step()
        came += [now[0]] * (len(client.deltas) - len(came))
    gaps = [b - a for a, b in pairwise(came[2:-1])]
    assert PACE / 2 <= max(gaps) <= max(1.5 * PACE, 2.01 * step)
    assert min(gaps) >= min(PACE / 2, step) - 1e-6


def test_as_many_rows_as_are_busy(model, make, monkeypatch):
    monkeypatch.setattr(batch_size, "ROOMY_TURNS", 8)
    taken = make()
    long = Client(taken, model, asked(3, 90))
    others = [Client(taken, model, asked(3, 6)) for _ in range(2)]
    seen = []
    while not long.ended:
        taken.step()
        seen.append(taken._batch.rows)
    assert {*seen} == {2, 3} and seen[-1] == 2
    check(model, [long, *others])


def test_first_come_first_served_and_one_piece_between_steps(model, make, monkeypatch):
    """Those that run wait for one piece of a prompt at most."""
    taken, read, most = make(), [0], []
    device = taken._batch
    true_read, true_run = device.read, device.run

    def reading(row):
        read[0] += device.next_tokens(row)
        return true_read(row)

    def running(*given):
        most.append(read[0])
        read[0] = 0
        return true_run(*given)

    monkeypatch.setattr(device, "read", reading)
    monkeypatch.setattr(device, "run", running)
    clients = [Client(taken, model, asked(n, 25)) for n in (3, 150, 4, 3, 90, 5)]
    order = []
    while len(order) < len(clients):
        taken.step()
        order += [n for n, c in enumerate(clients) if c.deltas and n not in order]
    assert order == sorted(order)
    assert max(most) == turns.PIECE and sum(n > 0 for n in most) > 4


def test_those_that_cannot_step_together_take_turns(model, make, monkeypatch):
    taken, groups = make(), []
    true = taken._batch.run

    def running(wanted_B, group, *rest):
        groups.append(group)
        return true(wanted_B, group, *rest)

    monkeypatch.setattr(taken._batch, "run", running)
    for drafts in (True, False):
        Client(taken, model, asked(3, 60, drafts=drafts))
    for _ in range(9):
        taken.step()
    assert groups[1:] == [Group(drafts=not group.drafts) for group in groups[:-1]]


def test_what_plain_decoding_wrote_is_no_start_for_drafts(model, make):
    """The drafter has read the prompt alone; without drafts all of it is reused."""
    taken, prompt = make(), model.encode("the cat in the hat and the other cat")
    [first] = run(taken, {0: [Request(prompt, Options(30), drafts=False)]}, model)
    more, reused = [*prompt, *first.result.token_ids, 5, 4], []
    for drafts in (False, True, True):
        [client] = run(taken, {0: [Request(more, Options(8), drafts=drafts)]}, model)
        reused.append(client.deltas[-1].ending.reused_tokens)
    n = len(prompt)
    assert reused == [n + 28, n - 1, n + 31]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "call", ["resize", "begin", "next_tokens", "read", "insert", "run"]
)
def test_everybody_is_told_whatever_raised(model, make, call, number, monkeypatch):
    """Also the request that was about to get its row; each once. Those that wait are answered by new rows."""
    for going_on in (False, True):
        taken, left = make(), [number]
        clients = [Client(taken, model, asked(n, 25)) for n in (3, 150, 4, 5, 6)]
        true = getattr(taken._batch, call)

        def raising(*given, left=left, true=true):
            left[0] -= 1
            if left[0] == 0:
                raise MemoryError("out of memory")
            return true(*given)

        monkeypatch.setattr(taken._batch, call, raising)
        with pytest.raises(MemoryError):
            for _ in range(200):
                taken.step()
        if going_on:
            lost = len(taken._jobs.on_device) + sum(client.stopped for client in clients)
            taken.restart(Stopped("a step failed"))
            finish(taken)
            assert 0 < sum(client.stopped for client in clients) == lost < len(clients)
            check(model, [client for client in clients if not client.stopped])
        else:
            # One that cannot be told keeps nobody else from it.
            clients[-1].job.deliver = None
            taken.fail(Stopped("the device is gone"))
            assert [client.stopped for client in clients] == [1] * 4 + [0]
            assert taken.busy == taken.waiting == 0


def test_the_smallest_loss_of_text(model, make):
    """A row whose whole text goes on is taken first, else the one that was used least recently."""
    taken = make(trees={3: Tree.none()})
    clients = run(taken, {0: [asked(n, 4) for n in (9, 20, 40)]}, model)
    texts = [[*c.request.prompt, *c.result.token_ids] for c in clients]
    run(taken, {0: [Request([*texts[1], 5], Options(3))]}, model)
    run(taken, {0: [Request([7] * 9, Options(3))]}, model)
    begins = [row.cached[:1].tolist() for row in taken._jobs.rows]
    assert begins == [[7], [5], [5]]
