"""A batch has room for all that a step writes."""

from types import SimpleNamespace

from tiny import tiny_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import rows
from medusa_jax.decoding.state import Engine
from medusa_jax.heads.lookahead import LookaheadConfig
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.serving import batch as batches
from medusa_jax.serving.batch import Batch
from medusa_jax.tree.tree import Tree

CONFIG = tiny_arch(n_layers=1)


class State(SimpleNamespace):
    """Stands for the rows' state."""

    def replace(self, **fields):
        return State(**(vars(self) | fields))


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
