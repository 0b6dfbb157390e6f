"""Continuous batching: each request is answered as if it were alone, whatever the order of arrival.

In float64, where texts are equal without exception. Turns are taken by hand, so that arrivals are
the same in every run."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cases import wide
from tiny import tiny_arch
from turns import PIECE, TREE, Client, alone, check, finish, run, scheduler_of

from medusa_jax import Options, Tree, UserError
from medusa_jax.api.tree_choice import TreeChoice
from medusa_jax.arch import HeadsConfig
from medusa_jax.decoding import rows
from medusa_jax.decoding.constrained import MANY
from medusa_jax.decoding.state import Engine, progress_of
from medusa_jax.decoding.stopping import PAUSED, RUNNING
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.serving import Request, batch, chunks
from medusa_jax.serving.batch import FEW_STEPS
from medusa_jax.serving.engines import Engines
from medusa_jax.serving.job import make_job
from medusa_jax.serving.request import Handle, Lines, TooLong

pytestmark = pytest.mark.usefixtures("x64")

LONG = "the cat and in the hat, " * 9


@pytest.fixture(scope="module", autouse=True)
def few_slots():
    """So that texts of a tiny model outgrow them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "LEAST_SLOTS", 128)
        yield


def options(n, temperature=0.0, **fields):
    return Options(max_new_tokens=n, temperature=temperature, **fields)


@pytest.fixture(scope="module")
def scheduler(model):
    return scheduler_of(model)


def test_no_text_depends_on_slot_neighbours_or_arrival(model, scheduler):
    """Rows and slots grow and shrink on the way, prompts are read in pieces, two share a start."""
    arrivals = {
        0: [Request("the cat and", options(60, 0.9, seed=4, top_k=9))],
        1: [Request("in", options(5)), Request("in", options(20, 0.9, seed=4), id=1)],
        4: [Request(LONG, options(30)), Request("abc", options(9), drafts=False)],
        9: [Request(LONG + "abc", options(20, 1.1, seed=2, min_p=0.01))],
        30: [Request("the", options(2, 0.9)), Request("the cat", options(40, 1.0, seed=8))],
    }
    batch = scheduler._batch
    seen, short = set(), []
    true_run = batch.run

    def watched(wanted_B, *rest):
        before = jax.tree.map(np.array, progress_of(batch._state))
        progress, tree = true_run(wanted_B, *rest)
        ran_B = (wanted_B == RUNNING) & np.isin(before.status_B, (RUNNING, PAUSED))
        ended_B = ran_B & (np.array(progress.status_B) != RUNNING)
        taken_B = np.array(progress.steps_B) - before.steps_B
        if ((wanted_B == RUNNING) & ~ran_B).any():  # ended, which the host did not know
            short.append(taken_B.max())
        assert not ended_B.any() or set(taken_B[ended_B]) == {taken_B.max()}
        seen.add((batch.rows, batch.slots, rest[0].drafts, tree.n_nodes))
        assert len(wanted_B) == batch.rows
        return progress, tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "run", watched)
        clients = run(scheduler, arrivals, model)
    check(model, clients)
    assert short and 0 < max(short) <= FEW_STEPS
    rows, slots, drafts, nodes = map(set, zip(*seen))
    assert rows == {2, 3} and slots >= {128, 256}
    assert drafts == {True, False} and nodes == {1, TREE.n_nodes}
    for rows, _, drafts, nodes in seen:
        assert nodes == (scheduler._batch.engines.trees[rows].n_nodes if drafts else 1)
    assert scheduler.busy == scheduler.waiting == 0
    reused = [client.deltas[-1].ending.reused_tokens for client in clients]
    longest = model.encode(LONG)
    assert max(reused) >= len(longest) - 1  # LONG + "abc" read what is after LONG alone


def test_a_paused_row_is_not_overwritten(model, scheduler):
    """One fills the slots that there are and has to wait for more, while another group steps."""
    long = model.encode(LONG)[:100]
    drafted = [Request(long, options(90, seed=n), id=n) for n in range(2)]
    plain = Request("the hat", options(120), drafts=False)
    clients = run(scheduler, {0: [drafted[0], plain], 9: [drafted[1]]}, model)
    check(model, clients)


def test_a_start_is_reused_of_a_row_that_ended_without_room(model, scheduler, monkeypatch):
    """What the steps of others write for it is hidden from a later text, but has to be numbers."""
    monkeypatch.setattr("medusa_jax.serving.batch_size.ROOMY_TURNS", 4)
    scheduler._size.resize(2, 256)
    start = model.encode(LONG)[:100]
    longer, other = Request(start, options(60)), Request("the hat", options(90))
    clients = run(scheduler, {0: [longer, other], 35: [Request(start, options(9))]}, model)
    assert scheduler._batch.slots == 128  # fewer than the first row's text had
    assert clients[-1].deltas[-1].ending.reused_tokens == len(start) - 1
    check(model, clients)


@pytest.mark.wide
def test_a_conversation_is_read_from_where_it_goes_on(model, scheduler):
    """Turn by turn as a chat has it: what the model said itself is not read again either."""
    prompt, known = model.encode("the hat and"), 0
    for turn in range(3):
        request = Request(prompt, options(12, 0.8, seed=turn))
        [client] = run(scheduler, {0: [request]}, model)
        check(model, [client])
        reused = client.deltas[-1].ending.reused_tokens
        if turn:
            # All but the last token of the answer, and the one before it is read again.
            assert reused == known - 2
        prompt = [*prompt, *client.result.token_ids]
        known = len(prompt)
        prompt += model.tokenizer.encode(" in")


def test_another_turn_after_the_same_start(model, scheduler):
    """The drafter too goes on from where texts part: drafts are those of a fresh start."""
    start = model.encode("the cat in the hat and the other cat in a hat")
    first, second = (start + model.tokenizer.encode(end) for end in ("abc", "the"))
    scheduler._size.resize(2, 256)  # where there is a tree
    [cold] = run(scheduler, {0: [Request(second, options(40))]}, model)
    run(scheduler, {0: [Request(first, options(30))]}, model)
    [warm] = run(scheduler, {0: [Request(second, options(40))]}, model)
    assert warm.deltas[-1].ending.reused_tokens > 0
    assert warm.result.draft_depths == cold.result.draft_depths


@pytest.mark.wide
def test_rows_copy_from_their_own_texts(model, monkeypatch):
    """One tree copies and another does not; a text's start is what another row has read."""
    # What is barred is not worth copying.
    monkeypatch.setattr(model, "no_repeat_ngram_size", 0)
    monkeypatch.setattr(chunks, "PACE", 9.0)  # a slow machine takes as many steps by a turn
    copies, spares = Tree.copies(4).choices, [[5], [6], [7], [8]]
    copying = Tree.from_choices([*TREE.choices, *copies], spares)
    assert copying.spares
    trees = {1: copying, 2: TREE}
    scheduler = scheduler_of(model, trees)
    arrivals = {
        0: [Request("hat hat hat hat", options(110))],
        14: [Request("in", options(9, 0.8, seed=1))],
        16: [Request("the cat and the", options(60, 0.3, seed=2))],
    }
    clients = run(scheduler, arrivals, model)
    check(model, clients)
    # Deeper than what is drafted goes.
    assert min(depth for c in clients for depth in c.result.draft_depths) < -TREE.depth


def test_cancelled_requests_free_their_rows(model, scheduler):
    endless = Request("in", options(200, 1.0, seed=1))
    clients = [Client(scheduler, model, endless) for _ in range(5)]
    for _ in range(6):
        scheduler.step()
    for client in clients:
        client.handle.cancel()
    while scheduler.step():
        pass
    assert scheduler.busy == scheduler.waiting == 0
    assert clients[0].deltas and not any(client.ended for client in clients)
    check(model, run(scheduler, {0: [Request("in", options(20))]}, model))


@pytest.mark.wide
def test_log_probabilities_are_those_of_a_solo_run(model, scheduler):
    """One asks for them while another, who does not, is answered at the same time."""
    asked = Request(LONG, options(30, 1.0, seed=3, logprobs=4))
    other = Request("in", options(40, 1.0, seed=3))
    first, second = clients = run(scheduler, {0: [other], 3: [asked]}, model)
    check(model, clients)
    [expected] = alone(model, [asked])
    assert second.result.logprobs == [p for d in second.deltas for p in d.logprobs]
    np.testing.assert_allclose(second.result.logprobs, expected.logprobs, rtol=1e-9)
    for mine, theirs in zip(second.result.top_logprobs, expected.top_logprobs, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]
    assert first.result.logprobs is None and not first.deltas[0].logprobs
    # None after a stop string.
    asked = replace(asked, options=replace(asked.options, stop=(expected.text[6:9],)))
    [cut] = run(scheduler, {0: [asked]}, model)
    n = cut.result.new_tokens
    assert len(cut.result.logprobs) == len(cut.result.top_logprobs) == n < 30
    assert cut.result.token_ids == expected.token_ids[:n]


@pytest.mark.wide
@pytest.mark.parametrize("rule", ["typical", *wide("rejection")])
def test_texts_that_depend_on_the_drafts(model, rule):
    """Are those of a solo run with the same tree, whatever rule a row was used with before."""
    scheduler = scheduler_of(model, {1: TREE})
    start = "the cat and in the hat"
    drawn = options(30, 0.9, seed=3, epsilon=0.4, delta=0.7)
    for request in Request(start, options(30)), Request(start, drawn, 5, True, rule):
        [client] = run(scheduler, {0: [request]}, model)
        rules = "auto" if request.acceptance == "auto" else rule
        solo = [request.prompt], [request.options], [request.id]
        [expected] = model.generate(*solo, acceptance=rules)
        assert client.result.token_ids == expected.token_ids


def test_what_cannot_be_answered_is_refused_at_once(model):
    """A prompt of just the most is taken; an answer is cut at the most."""

    def job(request, most_prompt=399):
        return make_job(model, request, most_prompt, 5, Handle(lambda: None), print)

    for request in (
        Request("", options(3, stop=()), acceptance="wishful"),
        Request("a", options(3, 1.0), acceptance="greedy"),
        Request([10**6], options(3)),
        Request("a", options(3, eos_ids=range(9))),
        Request("a", options(3, logprobs=21)),
        Request("a", options(3), predicted=[1, model.config.vocab_size]),
        Request("a", options(3), min_tokens=2, stop_ids=[model.config.vocab_size]),
        "a text alone",
    ):
        with pytest.raises(UserError):
            job(request)
    prompt = model.encode("the cat")
    cut = job(Request(prompt, options(300)), len(prompt))
    assert cut.decode.limits == [cut.options.max_new_tokens] == [5]
    with pytest.raises(TooLong, match="shorten it"):
        job(Request(prompt, options(3)), len(prompt) - 1)


def test_the_limit_of_a_server_is_no_end_of_the_context(model, scheduler):
    """`Client` takes 300 tokens, the model's context is 400."""
    requests = [Request([5] * n, options(350, stop=())) for n in (30, 120)]
    clients = run(scheduler, {0: requests}, model)
    ends = [(one.result.new_tokens, one.result.finish_reason) for one in clients]
    assert ends == [(300, "length"), (280, "context")]


@pytest.mark.parametrize(
    "fields",
    [
        {"options": None}, {"options": {"seed": 1}}, {"id": 1.5}, {"id": "a"}, {"drafts": "no"},
        {"drafts": None}, {"acceptance": None}, {"stop_ids": 5}, {"stop_ids": "a"}, {"stop_ids": [-1]},
        {"min_tokens": -1}, {"min_tokens": "a"}, {"min_tokens": 1.5}, {"min_tokens": 2**31},
        {"predicted": "text"}, {"predicted": [-5]}, {"predicted": [0.5]}, {"predicted": None}, {"lines": 5}, {"idd": 5},
    ],
)  # fmt: skip
def test_requests_that_cannot_be(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        Request("in", **fields)


def test_numbers_of_numpy_in_a_request():
    request = Request("in", id=np.int64(7), stop_ids={5}, predicted=np.arange(3))
    assert (request.id, request.stop_ids, request.predicted) == (7, (5,), (0, 1, 2))
    assert type(request.id) is int
    for wrong in {"indent": "a"}, {"indent": -1}, {"seconds": 0}, {"seconds": "a"}:
        with pytest.raises(UserError, match=next(iter(wrong))):
            Lines(**wrong)


def test_a_step_has_room_for_every_tree(monkeypatch):
    """Of a step, of predicted tokens, and of constrained rows, whose chain is longer."""
    config = tiny_arch(n_layers=1)
    drafter = make_drafter(HeadsConfig(n_heads=4), config)

    def engine(tree, acceptance, sampled):
        return Engine(Llama(config, shards=1), drafter, tree, acceptance)

    def idle(engine, sizes, n_rows, slots):
        return SimpleNamespace(outputs=sizes.outputs)

    monkeypatch.setattr(batch, "LEAST_SLOTS", 128)
    monkeypatch.setattr(rows, "idle", idle)
    model = SimpleNamespace(engine=engine, variables_by=None, trees=TreeChoice(Tree.none()))
    tree = Tree.cartesian([3, 2])
    engines = Engines(model, {1: Tree.none(), 2: tree})
    made, widest = batch.Batch(engines, 100, 32), engines.widest
    assert widest == tree.n_nodes + MANY
    assert engines.longest == tree.path_length > 1
    assert made._state.outputs >= 100 + engines.longest
    assert made.slots_for(made.slots - widest) == made.slots
    assert made.slots_for(made.slots - widest + 1) == 2 * made.slots


@pytest.mark.wide
@pytest.mark.parametrize("tree", [TREE, *wide(Tree.from_choices([[0], [-1], [-1, -1]]))])
def test_predicted_tokens_are_copied_and_never_trusted(model, tree):
    """No text depends on them; only a right prediction is fast, and only for its own request."""
    scheduler = scheduler_of(model, {1: tree})
    drawn = options(60, 0.9, seed=4)
    right = alone(model, [Request("the cat and", drawn)])[0].token_ids
    asked = [
        Request("the cat and", drawn, predicted=ids) for ids in ([], right, right[::-1], [])
    ]
    asked += [replace(asked[1], prompt="in"), replace(asked[1], predicted=right * 99)]
    clients = run(scheduler, {0: asked}, model)
    check(model, clients)
    steps = [client.result.steps for client in clients]
    assert steps[0] == steps[3] and steps[1] == steps[5] < 0.8 * steps[0]
    lossy = replace(asked[1], acceptance="typical")  # its text depends on drafts
    jobs = (
        make_job(model, one, 399, 300, None, None) for one in (asked[1], lossy, asked[0])
    )
    assert [job.group.predicted for job in jobs] == [True, False, False]


@pytest.mark.wide
def test_what_was_read_of_a_cancelled_prompt_is_kept(model):
    """Each keystroke replaces the last request: a prompt of many pieces is read all the same."""
    scheduler, prompt = scheduler_of(model, {1: TREE}), [5, 6, 7, 8] * 75
    for n in range(9):
        client = Client(scheduler, model, Request([*prompt, *[9] * n], options(20)))
        for _ in range(2):
            scheduler.step()
        if client.deltas:
            break
        client.handle.cancel()
    finish(scheduler)
    check(model, [client])
    assert client.deltas[-1].ending.reused_tokens >= len(prompt) - 2 * PIECE
