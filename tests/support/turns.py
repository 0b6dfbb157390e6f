"""A scheduler of a tiny model whose turns are taken by hand, and clients of it."""

import jax
from tiny import write_model

import medusa_jax
from medusa_jax import Tree
from medusa_jax.serving import Stopped
from medusa_jax.serving.batch import Batch
from medusa_jax.serving.engines import Engines
from medusa_jax.serving.guide_threads import GuideThreads
from medusa_jax.serving.job import make_job
from medusa_jax.serving.programs import NotCompiled
from medusa_jax.serving.request import Handle
from medusa_jax.serving.scheduler import Scheduler

TREE = Tree.from_choices([[0], [1], [0, 0], [0, 0, 0]])
# Two rows with a tree, or three that decode plainly; prompts are read in pieces of `PIECE` tokens.
TREES, PIECE = {2: TREE, 3: Tree.none()}, 64


class InPlace:
    """Programs that are compiled where they are first needed."""

    def ready_or_queue(self, programs):
        return True

    is_ready = ready_or_queue


class Delayed:
    """Programs that are ready some turns after they were asked for; those of `failing` never."""

    def __init__(self, rng, most_turns):
        self.rng, self.most_turns, self.left, self.failing = rng, most_turns, {}, set()

    def ready_or_queue(self, asked):
        if asked in self.failing:
            raise NotCompiled("out of memory")
        self.left.setdefault(asked, self.rng.randrange(1, self.most_turns))
        return self.is_ready(asked)

    def is_ready(self, asked):
        return self.left.get(asked, 1) <= 0

    def a_turn_later(self):
        self.left = {asked: left - 1 for asked, left in self.left.items()}


def load_model(path):
    """In float64, with bars on repeats: a row's text so far, its prompt and reused start included, decides them."""
    jax.config.update("jax_enable_x64", True)
    write_model(path, max_position=400)
    fields = {"tree": TREE, "dtype": "float64", "no_repeat_ngram_size": 3}
    return medusa_jax.load(str(path), str(path / "heads"), **fields)


def scheduler_of(model, trees=TREES, programs=None):
    made = Batch(Engines(model, trees), 300, PIECE)
    scheduler = Scheduler(made, programs or InPlace(), GuideThreads(lambda: None))
    scheduler._chunks.most_steps = 3
    return scheduler


class Client:
    """Submits to a scheduler and keeps what comes back."""

    def __init__(self, scheduler, model, request):
        self.deltas, self.request = [], request
        self.handle = Handle(lambda: None)
        self.job = make_job(
            model,
            request,
            model.config.max_position - 1,
            300,
            self.handle,
            self.deltas.append,
        )
        scheduler.add(self.job)

    @property
    def ended(self):
        return bool(self.deltas and getattr(self.deltas[-1], "ending", None))

    @property
    def stopped(self):
        """How often it got an error instead of an answer."""
        return sum(isinstance(delta, Stopped) for delta in self.deltas)

    @property
    def result(self):
        return self.deltas[-1].ending.result

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)

    def check(self, expected):
        """All of the expected text, once, and one end after it."""
        result = self.result
        assert result.token_ids == expected.token_ids
        assert self.text == result.text == expected.text
        assert result.finish_reason == expected.finish_reason
        assert result.prompt_tokens == expected.prompt_tokens
        ids = [i for delta in self.deltas for i in delta.token_ids]
        assert ids == result.token_ids and all(d.ending is None for d in self.deltas[:-1])
        steps = sum(result.acceptance_histogram)
        appended = sum((i + 1) * n for i, n in enumerate(result.acceptance_histogram))
        assert result.steps == steps and appended == result.new_tokens - 1


def finish(scheduler, programs=None):
    """Take turns until all is answered."""
    for _ in range(5000):
        if programs:
            programs.a_turn_later()
        if not scheduler.step() and not scheduler.busy and not scheduler.waiting:
            return
    raise AssertionError("it does not end")


def run(scheduler, arrivals, model):
    """Requests by the turn that they come in; returns their clients when all is answered."""
    clients, turn = [], 0
    while scheduler.step() or turn <= max(arrivals):
        for request in arrivals.get(turn, ()):
            clients.append(Client(scheduler, model, request))
        turn += 1
        assert turn < 2000
    return clients


def alone(model, requests):
    """What each is answered without any other: plain decoding of one fixed batch.

    `tests/decoding/test_exactness.py` has that its rows are those of batches of one.
    """
    asked = [(r.prompt, r.options, r.id) for r in requests]
    return model.generate(*map(list, zip(*asked)), tree="none")


def check(model, clients):
    for client, expected in zip(clients, alone(model, [c.request for c in clients])):
        client.check(expected)
