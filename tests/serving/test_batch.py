"""A batch has room for all that a step writes."""

from types import SimpleNamespace

from tiny import tiny_arch

from medusa_jax.decoding import rows
from medusa_jax.decoding.state import Engine
from medusa_jax.heads.lookahead import LookaheadConfig
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.serving import batch
from medusa_jax.tree.tree import Tree


def test_a_step_has_room_for_the_tree_and_for_the_drafters_own_rows(monkeypatch):
    config, heads = tiny_arch(n_layers=1), LookaheadConfig(window=4, ngram=4, guesses=3)
    drafter = make_drafter(heads, config)

    def engine(tree, acceptance, sampled):
        return Engine(Llama(config, shards=1), drafter, tree, acceptance)

    def idle(engine, sizes, n_rows, slots):
        return SimpleNamespace(outputs=sizes.outputs)

    monkeypatch.setattr(batch, "LEAST_SLOTS", 128)
    monkeypatch.setattr(rows, "idle", idle)
    model = SimpleNamespace(engine=engine, variables_by=None)
    tree, extra = drafter.default_tree, len(drafter.window[0])
    made = batch.Batch(model, {1: Tree.none(), 2: tree}, 100, 32)
    assert made.widest == tree.n_nodes + extra > tree.n_nodes
    assert made.longest == tree.path_length > 1
    assert made._state.outputs >= 100 + made.longest
    assert made.slots_for(made.slots - made.widest) == made.slots
    assert made.slots_for(made.slots - made.widest + 1) == 2 * made.slots
