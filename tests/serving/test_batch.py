"""What a batch hands to its programs, which are not run here: every field of a request, the rule, tree
and drafter of a chunk, and room for all that a step writes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import tiny_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import rows
from medusa_jax.decoding.generate import FOREVER
from medusa_jax.decoding.generate import Request as DecodeRequest
from medusa_jax.decoding.sampling import row_keys
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.stopping import pack_stops
from medusa_jax.heads.lookahead import LookaheadConfig
from medusa_jax.heads.registry import make_drafter, no_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.serving import batch as batches
from medusa_jax.serving.batch import Batch
from medusa_jax.serving.job import STOPS, Group
from medusa_jax.tree.tree import Tree

CONFIG = tiny_arch(n_layers=1)
TREE = Tree.from_choices([[0], [1], [0, 0], [0, 0, 0]])


class State(SimpleNamespace):
    """Stands for the rows' state."""

    def replace(self, **fields):
        return State(**(vars(self) | fields))


def row_state(slots, logprobs=None):
    return State(
        cache=State(slots=slots),
        logprobs=logprobs,
        sampling=State(penalties=None, first_BW=None),
    )


def batch_of(monkeypatch, trees, heads=HeadsConfig(n_heads=3)):  # noqa: B008
    """A batch of no model: programs note what they are given instead of running."""
    monkeypatch.setattr(batches, "LEAST_SLOTS", 128)
    drafter = make_drafter(heads, CONFIG)

    def engine(tree, acceptance, sampled):
        return Engine(Llama(CONFIG, shards=1), drafter, tree, acceptance)

    def idle(engine, sizes, n_rows, slots):
        return State(
            status_B="idle",
            outputs=sizes.outputs,
            logprobs=None,
            sampling=State(penalties=None, first_BW=None),
        )

    monkeypatch.setattr(rows, "idle", idle)
    monkeypatch.setattr(rows, "take_row", lambda engine, state, source: source)
    model = SimpleNamespace(engine=engine, variables_by=lambda rule: f"for {rule}")
    return Batch(model, trees, 100, 32)


@pytest.fixture
def batch(monkeypatch):
    return batch_of(monkeypatch, {1: TREE, 2: Tree.none()})


def test_every_field_of_a_request_reaches_its_row(batch, monkeypatch):
    seen = []
    monkeypatch.setattr(rows, "begin_row", lambda engine, *given: seen.append(given))
    stops = ((9,), (3, 8))
    fields = ([0.5], [7], [0.75], [0.25], [11], [13], [0.125], [0.375], [17])
    batch.begin(DecodeRequest([[4, 5, 6]], [70], [stops], *fields), 1, 0, AUTO)
    batch.begin(DecodeRequest([[4, 5, 6]], [70], None, *fields[:-1]), 1, 0, AUTO)
    (source, sampling, limit_B, steps_B, stop_BQW), (*_, any_steps_B, no_stop_BQW) = seen
    names = ("temperature", "top_k", "top_p", "min_p", "epsilon", "delta")
    got = [getattr(sampling, f"{name}_B").tolist() for name in names]
    assert got == [[0.5], [7], [0.75], [0.25], [0.125], [0.375]]
    own = row_keys(np.array([11], np.uint32), np.array([13], np.int32))
    np.testing.assert_array_equal(*map(jax.random.key_data, (sampling.key_B, own)))
    assert (source, limit_B.tolist(), steps_B.tolist()) == (1, [70], [17])
    assert any_steps_B.tolist() == [FOREVER]
    np.testing.assert_array_equal(stop_BQW, pack_stops([stops], STOPS))
    np.testing.assert_array_equal(no_stop_BQW, pack_stops([()], STOPS))


AUTO = Group(True)
ONE = ([0.0], [0], [1.0], [0.0], [0], [0], [0.1], [0.1])


@pytest.fixture
def pieces(batch, monkeypatch):
    """Of prompts, with the engine that reads each."""
    seen = []

    def resized(engine, sizes, n_rows, slots, row):
        assert n_rows == 1
        return row_state(slots)

    def read_row(engine, variables, row, piece):
        assert row.cache.slots == batch.slots
        assert variables == f"for {engine.acceptance}"
        seen.append((engine, piece))
        return row

    row = row_state(batch.slots)
    monkeypatch.setattr(rows, "begin_row", lambda *given: row)
    monkeypatch.setattr(rows, "resized", resized)
    monkeypatch.setattr(rows, "read_row", read_row)
    return seen


@pytest.mark.parametrize(
    ("shared", "wanted"),
    [
        # The last 64 or fewer in pieces of 16.
        (0, [(0, 32), (32, 32), (64, 16), (80, 16), (96, 16), (112, 16)]),
        (2, [(0, 32), (32, 32), (64, 16), (80, 16), (96, 16), (112, 16)]),  # saves nothing
        (41, [(40, 32), (72, 16), (88, 16), (104, 16), (120, 16)]),
        (111, [(110, 16)]),
    ],
)
def test_a_prompt_in_pieces(batch, pieces, shared, wanted):
    """Each with the token after every one of its tokens; the last shared token is read again."""
    prompt = np.arange(1, 122)
    reading = batch.begin(
        DecodeRequest([prompt.tolist()], [9], None, *ONE), 0, shared, AUTO
    )
    batch.slots = 256  # another text has outgrown the slots since
    while not reading.done:
        batch.read(reading)
    padded = np.pad(prompt, (0, 40))
    assert [(int(p.begin_B[0]), p.tokens_BT.shape[1]) for _, p in pieces] == wanted
    for (begin, T), (_, piece) in zip(wanted, pieces):
        assert piece.tokens_BT[0].tolist() == padded[begin : begin + T].tolist()
        assert piece.next_BT[0].tolist() == padded[begin + 1 : begin + T + 1].tolist()
        assert piece.length_B.tolist() == [121]


def test_the_last_piece_ends_with_the_slots(batch, pieces):
    prompt = list(range(1, 122))
    reading = batch.begin(DecodeRequest([prompt], [9], None, *ONE), 0, 118, AUTO)
    batch.read(reading)
    [(_, piece)] = pieces
    assert piece.begin_B.tolist() == [batch.slots - 16] and reading.done
    assert piece.tokens_BT[0, :9].tolist() == prompt[-9:]


def test_a_text_is_not_reused_after_other_heads(batch, pieces, monkeypatch):
    """What the drafter of a row holds is of the heads that its rule reads; so is its first token."""
    monkeypatch.setattr(rows, "insert_row", lambda engine, state, row, at: state)
    monkeypatch.setattr(batches, "progress_of", lambda row: None)
    known = {}
    for rule in ("auto", "typical", "rejection", "greedy"):
        prompt = DecodeRequest([list(range(1, 122))], [9], None, *ONE)
        reading = batch.begin(prompt, 1, 101, Group(True, rule))
        known[rule] = reading.position
        batch.read(reading)
        batch.insert(reading, 1)
    assert known == {"auto": 100, "typical": 0, "rejection": 100, "greedy": 0}
    drawn_by = [engine.acceptance for engine, _ in pieces]
    assert drawn_by == ["sampled", "typical", "rejection", "greedy"]


@pytest.mark.parametrize("drafts", [True, False])
def test_a_chunk_has_its_rule_tree_and_drafter(batch, monkeypatch, drafts):
    seen = []

    def run_only(engine, status_B, wanted_B, steps, few):
        assert status_B == "idle"
        return wanted_B, (int(steps), int(few))

    def decode_loop(engine, variables, state, max_steps, until_one_ends):
        assert variables == "for typical"
        seen.append((engine, state.status_B, max_steps, until_one_ends))
        return state, "progress"

    monkeypatch.setattr(rows, "run_only", run_only)
    monkeypatch.setattr(batches, "decode_loop", decode_loop)
    progress, n_nodes = batch.run("wanted", Group(drafts, "typical"), 8, 2)
    [(engine, status_B, steps, until_one_ends)] = seen
    assert (progress, status_B, steps, until_one_ends) == (
        "progress",
        "wanted",
        (8, 2),
        True,
    )
    assert engine.acceptance == "typical"
    assert (
        engine.tree == (TREE if drafts else Tree.none()) and n_nodes == engine.tree.n_nodes
    )
    assert (engine.drafter == no_drafter(CONFIG)) != drafts


def test_a_step_has_room_for_the_tree_and_what_is_extra_it(monkeypatch):
    heads = LookaheadConfig(window=4, ngram=4, guesses=3)
    drafter = make_drafter(heads, CONFIG)
    tree, extra = drafter.default_tree, len(drafter.window.depth_X)
    batch = batch_of(monkeypatch, {1: Tree.none(), 2: tree}, heads)
    assert batch.widest == tree.n_nodes + extra > tree.n_nodes
    assert batch.longest == tree.path_length > 1
    assert batch._state.outputs >= 100 + batch.longest
    slots = batch.slots
    assert batch.slots_for(slots - batch.widest) == slots
    assert batch.slots_for(slots - batch.widest + 1) == 2 * slots
