"""Who gets which row and when, on a batch that runs no model (`fake_batch.py`)."""

import random

import pytest
from fake_batch import FakeBatch, InPlace, solo

from medusa_jax import Options, Tree
from medusa_jax.api import StoppingText
from medusa_jax.decoding.generate import Request as DecodeRequest
from medusa_jax.serving import Request, room, scheduler
from medusa_jax.serving.job import Job
from medusa_jax.serving.request import Handle

TREES = {1: Tree.chain(3), 2: Tree.chain(2), 4: Tree.none()}
PIECE = 16
# Some texts begin alike, and some go on as another one did.
STARTS = [[7] * 20, [7] * 20 + [8] * 9, [9, 8, 7], list(range(1, 46))]


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids, skip_special=True):
        return "".join(chr(ord("a") + i % 26) for i in ids)


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.setattr(scheduler, "Batch", FakeBatch)
    return scheduler.Scheduler(
        None, programs=InPlace(), trees=TREES, most_new=300, chunk_steps=3, piece=PIECE
    )


class Client:
    """A request that was added, and what came back."""

    def __init__(self, turns, prompt, n, drafts=True, acceptance="auto", **options):
        self.deltas, self.handle = [], Handle(lambda: None)
        self.solo, drafted = (
            solo(prompt, n),
            Request(prompt, Options(n, **options), 0, drafts, acceptance),
        )
        text = StoppingText(Letters(), drafted.options.stop)
        self.job = Job(
            drafted, DecodeRequest([prompt], [n]), text, self.handle, self.deltas.append
        )
        turns.add(self.job)

    @property
    def token_ids(self):
        return [i for delta in self.deltas for i in delta.token_ids]

    @property
    def ended(self):
        return bool(self.deltas and self.deltas[-1].ending)

    def check(self):
        """All of the text, once, and one end after it."""
        text = Letters().decode(self.solo)
        [stop] = self.job.options.stop or [None]
        if stop is not None and stop in text:
            text = text[: text.index(stop)]
        else:
            assert self.token_ids == self.solo
        assert "".join(delta.text for delta in self.deltas) == text
        assert [bool(delta.ending) for delta in self.deltas].index(True) == len(
            self.deltas
        ) - 1


def take_turn(turns):
    """One turn, in which whatever runs waits for one piece of a prompt at most."""
    before = turns._batch.tokens_read
    more = turns.step()
    assert turns._batch.tokens_read - before <= PIECE
    return more


def finish(turns):
    for _ in range(2000):
        if not take_turn(turns):
            assert turns.busy == turns.waiting == 0
            return
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(16))
def test_whatever_comes_and_goes(turns, seed, monkeypatch):
    """Every text is that of a solo run; the batch itself sees that no start is taken for another."""
    monkeypatch.setattr(room, "PATIENCE", [3, 64][seed % 2])
    rng, clients = random.Random(seed), []
    for _ in range(150):
        if rng.random() < 0.25:
            earlier = [c for c in clients if c.ended]
            prompt = list(rng.choice(STARTS))[: rng.randrange(1, 46)]
            if earlier and rng.random() < 0.5:  # a conversation goes on
                before = rng.choice(earlier)
                prompt = [*before.job.prompt, *before.token_ids, 5]
            stop = (Letters().decode(solo(prompt, 9)[7:]),) if rng.random() < 0.2 else ()
            n, drafts = rng.choice([1, 5, 20, 60]), rng.random() < 0.6
            logprobs = rng.choice([None, None, 2])
            clients.append(
                Client(turns, prompt[-120:], n, drafts, stop=stop, logprobs=logprobs)
            )
        if clients and rng.random() < 0.03:
            rng.choice(clients[-4:]).handle.cancel()
        take_turn(turns)
        answered = [row.job for row in turns._rows if row.job]
        assert not any(job.handle.cancelled for job in answered)
    finish(turns)
    for client in clients:
        if not client.handle.cancelled:
            client.check()
    assert len({rows for rows, _ in turns._batch.runs}) > 1
    reused = [c.deltas[-1].ending.reused_tokens for c in clients if c.ended]
    assert max(reused) > 20


def test_as_many_rows_as_are_busy(turns):
    batch = turns._batch
    long = Client(turns, [1], 900 // 3)
    turns.step()
    assert batch.rows == 1
    others, alone = [], 0
    for n_rows in (2, 4):
        others.append(Client(turns, [2], 6))
        turns.step()
        assert batch.rows == n_rows
    while batch.rows > 1:
        assert not long.ended
        alone += turns.busy == 1
        turns.step()
    assert all(client.ended for client in others)
    assert alone > room.PATIENCE / 2  # a request may come soon


@pytest.mark.parametrize("patience", range(1, 6))
def test_a_smaller_cache_holds_what_the_host_has_not_seen(turns, patience, monkeypatch):
    """Slots are given up while a text grows beyond what is left, a chunk before the host knows."""
    monkeypatch.setattr(room, "PATIENCE", patience)
    Client(turns, [2] * 40, 2)
    finish(turns)
    growing = Client(turns, [1] * 3, 60)
    finish(turns)
    growing.check()


def test_a_chunk_has_one_rule(turns):
    """That of every row which steps in it: the batch complains otherwise."""
    rules = ("auto", "typical", "sampled", "rejection")
    clients = [Client(turns, [3], 40, acceptance=rule) for rule in rules]
    finish(turns)
    for client in clients:
        client.check()


@pytest.mark.parametrize(
    ("n_clients", "away", "share"), [(8, 0, 0.93), (8, 2, 0.88), (20, 0, 0.99)]
)
def test_rows_are_hardly_ever_empty(monkeypatch, n_clients, away, share):
    """Each client asks again this many steps after it was answered: a step is of use to nearly every
    row."""
    monkeypatch.setattr(scheduler, "Batch", FakeBatch)
    turns = scheduler.Scheduler(
        None, programs=InPlace(), trees={8: Tree.chain(2)}, most_new=300, piece=PIECE
    )
    rng, clients, all_clients = random.Random(0), [], []
    steps, come_back = turns._batch.steps, [0] * n_clients
    for _ in range(250):
        come_back += [len(steps) + away for client in clients if client.ended]
        clients = [client for client in clients if not client.ended]
        for at in [at for at in come_back if at <= len(steps)]:
            come_back.remove(at)
            clients.append(Client(turns, [len(clients)], rng.choice([16, 64, 128])))
            all_clients.append(clients[-1])
        turns.step()
    assert sum(steps[20:]) / (8 * len(steps[20:])) > share
    # Pieces of a text that goes on are of 4 steps or more, however short the chunks are.
    taken = [
        sum(depth == 0 for _, depth in delta.parts)
        for client in all_clients
        for delta in client.deltas[1:-1]
    ]
    assert min(taken) == 4


def test_a_long_prompt_is_read_between_steps(turns):
    """Those that run get a chunk after every piece, also where short prompts came before it."""
    Client(turns, [1], 250)
    turns.step()
    Client(turns, [2], 9)
    Client(turns, [4] * 100, 9)
    for _ in range(9):
        steps = len(turns._batch.steps)
        take_turn(turns)
        assert len(turns._batch.steps) > steps
    assert turns._batch.tokens_read >= 100


def test_what_plain_decoding_wrote_is_no_start_for_drafts(turns):
    """The drafter has read the prompt alone; without drafts all of it is reused."""
    prompt = [6] * 12
    first = Client(turns, prompt, 10, drafts=False)
    finish(turns)
    more = [*prompt, *first.token_ids, 5, 4]
    reused = []
    for drafts in (False, True, True):
        client = Client(turns, more, 8, drafts)
        finish(turns)
        reused.append(client.deltas[-1].ending.reused_tokens)
    assert reused == [20, 11, 23]


def test_which_text_is_given_up(turns):
    """None where a row's whole text goes on, else the one that has been there the longest."""
    clients = [Client(turns, [n] * 9, 10 * n) for n in (1, 2, 3, 4)]
    finish(turns)
    known = [list(row.cached) for row in turns._rows]
    Client(turns, [*clients[2].job.cached(999)[0], 5], 3)
    finish(turns)
    Client(turns, [9] * 9, 3)
    finish(turns)
    begins = [row.cached[0] for row in turns._rows]
    assert begins == [9, 2, 3, 4]
    for n in (1, 3):
        assert list(turns._rows[n].cached) == known[n]


@pytest.mark.parametrize("n", range(10, 18))
def test_the_last_slots_of_an_ended_row_are_others_to_write(turns, n):
    """It ends where the cache is full, or shortly before, and another one takes its steps."""
    trees = {2: Tree.chain(3)}  # a step of the other writes as much as any
    turns = scheduler.Scheduler(
        None, programs=InPlace(), trees=trees, most_new=300, chunk_steps=3, piece=PIECE
    )
    full = Client(turns, [2] * 14, n)
    turns.step()
    Client(turns, [1] * 3, 25)
    while not full.ended:
        turns.step()
    turns.step()
    assert turns._batch.slots == 32
    again = Client(turns, [*full.job.cached(999)[0], 5], 2)
    finish(turns)
    again.check()


def test_first_come_first_served(turns):
    clients, order = [Client(turns, [n], 40) for n in range(1, 9)], []
    while len(order) < len(clients):
        turns.step()
        order += [n for n, c in enumerate(clients) if c.deltas and n not in order]
    assert order == sorted(order)


def test_those_that_cannot_step_together_take_turns(turns):
    for drafts in (True, False):
        Client(turns, [3], 60, drafts)
    for _ in range(8):
        turns.step()
    kinds = [drafts for _, drafts in turns._batch.runs]
    assert kinds[1:] == [not kind for kind in kinds[:-1]]
