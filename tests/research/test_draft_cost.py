"""The cost of drafting, from shapes alone, against the figures of the literature."""

import dataclasses
import json

import pytest

from medusa_jax.config import HeadsConfig, LlamaConfig
from research import draft_cost

# Percent of one backbone pass, 7B, weights read once.
EXPECTED = {
    "medusa": 9.0,
    "amphista": 17.0,
    "amphista, rank 256": 9.5,
    "hydra++ (layers tied, as released)": 19.0,
}


@pytest.fixture(scope="module")
def found():
    return draft_cost.measure("llama-7b", 512, list(EXPECTED))


@pytest.mark.wide
def test_shares_of_a_backbone_pass(found):
    assert {row["drafter"] for row in found["rows"]} == {*EXPECTED}
    for row in found["rows"]:
        expected = EXPECTED[row["drafter"]]
        assert abs(100 * row["weights_share"] - expected) < 0.5
        # Counted by XLA: activations on both sides, tied layers as often as they are used.
        assert abs(100 * row["share"] - expected) < 2.5
    assert abs(found["backbone_weight_bytes"] / 4 / 6.61e9 - 1) < 0.01


def test_layers_cost_alike():
    """Four layers, compiled, cost what one and two promise."""
    tree, arch = draft_cost.paper_tree(), LlamaConfig(512, 128, 4, 4, 4, 32, 256, 1024)
    whole, promised = (
        cost(arch, tree, 128) for cost in (draft_cost.pass_cost, draft_cost.backbone_cost)
    )
    assert whole["weights"] == promised["weights"]
    assert abs(whole["bytes"] / promised["bytes"] - 1) < 0.02


def test_a_draft_vocabulary_is_what_heads_read():
    """Four LM heads of 64 columns of 512, own or the backbone's."""
    arch, tree = LlamaConfig(512, 128, 1, 4, 4, 32, 256, 1024), draft_cost.paper_tree()
    blocks, columns = 4 * (128 * 128 + 128), 128 * 64
    costs = {}
    for kind, parameters in (("own", blocks + 4 * columns), ("shared", blocks)):
        heads = HeadsConfig(n_heads=4, lm_head=kind)
        whole = draft_cost.draft_bytes(heads, arch, tree, 128)
        few = dataclasses.replace(heads, draft_vocab=64)
        costs[kind] = draft_cost.draft_bytes(few, arch, tree, 128)
        assert costs[kind][1:] == (4.0 * parameters, parameters)
        assert costs[kind][0] < 0.75 * whole[0]
    assert costs["own"][0] - costs["shared"][0] > 0.8 * 4 * 3 * columns


def test_the_tree_has_the_levels_of_the_published_one():
    tree = draft_cost.paper_tree()
    assert tree.n_nodes == 64 and tree.depth == 4
    assert [len(tree.level(d)) for d in range(5)] == [1, 10, 28, 23, 2]
    parents = [len({int(tree.parent_M[n]) for n in tree.level(d)}) for d in range(1, 5)]
    assert parents == [1, 10, 10, 1]


def test_command(monkeypatch, capsys, found):
    monkeypatch.setattr(draft_cost, "measure", lambda *_, **__: found)
    assert draft_cost.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert draft_cost.main([]) == 0
    assert "| amphista, rank 256 | 0.64 B |" in capsys.readouterr().out
