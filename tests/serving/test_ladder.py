"""The size of the tree that a chunk of steps takes: what is measured, what is chosen, and that no text shows it."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import turns
from turns import TREE, InPlace, check, run

from medusa_jax import Options, Tree
from medusa_jax.api import Result
from medusa_jax.serving import Request
from medusa_jax.serving.engines import Engines
from medusa_jax.serving.http.metrics import Metrics
from medusa_jax.serving.http.replies import Reply
from medusa_jax.serving.job import Group, Job
from medusa_jax.serving.ladder import Ladder, ladder_sizes
from medusa_jax.serving.programs import Programs
from medusa_jax.serving.request import Ending

SIZES = [Tree.none(), Tree.chain(1), Tree.chain(3)]
TOKENS = [1.0, 1.6, 2.4]


def steps(*shares):
    """Steps of which these shares appended 1, 2, ... tokens."""
    return np.array([int(100 * share) for share in (*shares, *[0.0] * (4 - len(shares)))])


def chosen(ladder, counts, ready=(1, 2, 4), rows=1, chunks=400, seconds=(1.0, 1.3, 1.6)):
    """The most frequent of many choices, and the fastest size, where steps take these times."""
    seen = []
    for _ in range(chunks):
        nodes, fastest = ladder.choose("", rows, 4, [counts], ready)
        ladder.costs[""].add(rows, nodes, 0.04 * seconds[(1, 2, 4).index(nodes)], 4)
        seen.append(nodes)
    assert max(map(seen.count, seen)) > 0.9 * chunks
    return max(seen, key=seen.count), fastest


def test_acceptance_and_cost_choose_the_size():
    def after(*shares, **fields):
        ladder = Ladder(SIZES, TOKENS)
        counts = ladder.begin()
        ladder.count(counts, steps(*shares), 4, False)
        return chosen(ladder, counts, **fields)

    assert after(0.1, 0.1, 0.1, 0.7) == (4, 4)
    assert after(0.5, 0.5) == (2, 2)
    assert after(1.0) == (1, 1)
    dear = {"seconds": (1.0, 1.9, 3.4)}
    assert after(0.4, 0.3, 0.2, 0.1, **dear) == (1, 1)
    assert after(0.5, 0.5, ready=(1, 4))[1] in (2, 1)  # which has no programs yet


def test_a_request_begins_with_what_others_accepted():
    ladder = Ladder(SIZES, TOKENS)
    first, other = ladder.begin(), ladder.begin()
    for _ in range(20):
        ladder.count(other, steps(1.0), 4, True)  # its drafter has a gap
    assert ladder.begin() == pytest.approx(first)
    for _ in range(20):
        ladder.count(other, steps(1.0), 4, False)
    assert ladder.begin()[0, 0] < 0.1 * first[0, 0]
    assert ladder.begin()[1, 0] == first[1, 0]


def test_figures_of_drafts_are_of_the_steps_that_had_any():
    """Not of plain steps between them, nor of those after a stop string; none without a step."""
    job, reply, chain = Job(*[None] * 6), Reply.__new__(Reply), Tree.chain(3)
    for n, tree in ((0, None), (2, chain), (3, Tree.none()), (5, chain)):
        progress = SimpleNamespace(steps_B=[n], length_B=[9], histogram_BL=[np.zeros(1)])
        job.see(progress, 0, tree)
    depths = [0, 1, 0, 0, 0, 1, 2, 0]
    for n_tokens, by_step, drafted in ((8, [1, 0, 2], 9), (3, [1], 3), (1, [], 0)):
        result = Result("", depths, depths, "length", 3, 4, [2, 1, 1, 0], 0.1, 0.1, 0.0)
        result.cut(n_tokens, "")
        reply.endings = {0: Ending(result, 0.0, 0, job.drafts)}
        metrics = Metrics(SimpleNamespace(learner=None))
        metrics.ended(reply.endings[0])
        steps = metrics.registry.get_sample_value("vllm:spec_decode_num_drafts_total")
        assert (steps, reply.endings[0].drafted) == (len(by_step), drafted)
        figures = reply.metrics().get("metrics", {}).get("speculative_decoding", {})
        assert figures.get("num_draft_tokens", 0) == drafted
        assert figures.get("mean_acceptance_length", 1) == 1 + np.mean(by_step or [0])


class Queueing(InPlace):
    """Programs of sizes are ready once they were queued."""

    def __init__(self):
        self.queued = []

    def is_ready(self, asked):
        return asked.nodes is None or asked in self.queued

    def queue(self, programs):
        self.queued.append(programs)


@pytest.mark.wide
@pytest.mark.usefixtures("x64")
def test_no_text_depends_on_the_sizes(model, monkeypatch):
    """A random one for each chunk, plain steps among them; a prompt is read again where the drafter has a gap."""
    monkeypatch.setattr(model, "trees", replace(model.trees, chooses=True))
    assert [tree.n_nodes for tree in ladder_sizes(model, [TREE])] == [1, 2, 4, 5]
    programs, rng = Queueing(), random.Random(0)
    taken = turns.scheduler_of(model, {2: TREE}, programs)
    ran, true = [], taken._batch.run

    def choose(kind, rows, first, counts, ready):
        return rng.choice(ready), rng.choice([1, 2, 4])

    def running(status_B, group, *rest):
        size = taken._batch.rows, taken._batch.slots
        assert programs.is_ready(Programs(group, *size, rest[-1]))
        ran.append((group.drafts, rest[-1]))
        return true(status_B, group, *rest)

    monkeypatch.setattr(taken._chunks._ladder, "choose", choose)
    monkeypatch.setattr(taken._batch, "run", running)
    asked = [
        Request("the cat and", Options(60, 0.9, seed=4)),
        Request("in", Options(90)),
        Request("abc", Options(40, 0.8)),
    ]
    clients = run(taken, {0: asked[:2], 9: asked[2:]}, model)
    check(model, clients)
    assert {(True, None), (False, None), (True, 2), (True, 4)} == set(ran)
    prompt = [*model.encode("in"), *clients[1].result.token_ids]
    again = run(taken, {0: [Request(prompt, Options(20))]}, model)
    check(model, again)
    assert again[0].deltas[-1].ending.reused_tokens < len(prompt) - 2
    assert clients[0].deltas[-1].ending.drafted < 4 * clients[0].result.steps


def test_rules_that_read_drafts_keep_one_tree(model, monkeypatch):
    monkeypatch.setattr(model, "trees", replace(model.trees, chooses=True))
    engines = Engines(model, {1: TREE})
    assert engines.text_is_free(Group())
    rules = [Group(rule=rule) for rule in ("typical", "rejection")]
    others = [*rules, Group(constrained=True), Group(predicted=True)]
    assert not any(map(engines.text_is_free, others))
