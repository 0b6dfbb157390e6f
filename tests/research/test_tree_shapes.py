"""Trees of one depth and random dense ones: what is counted, what is timed, the gap between."""

import json

import numpy as np
import pytest
from tiny import write_model

from medusa_jax.tree import growth
from medusa_jax.tree.tree import Tree
from research import tree_shapes as shapes


def texts(K):
    """Ranks that fall off geometrically, in four texts."""
    rng = np.random.default_rng(0)
    ranks = (rng.geometric(0.5, (300, K)) - 1 for _ in range(4))
    return [growth.Recorded.of_heads(r) for r in ranks]


def test_trees_of_one_depth_leave_deeper_heads_out():
    def grow(texts):
        return growth.order_by_steps(texts, 127, copies=False)

    five = texts(5)
    sizes = (22, 35, 45, 64)
    found = shapes.of_one_depth(five, grow, (*sizes, 200))
    assert [tree.n_nodes for tree in found] == list(sizes)
    assert [tree.depth for tree in found] == [4] * 4
    four = shapes.of_one_depth([text.cut(4) for text in five], grow, sizes)
    assert found == four
    lengths = list(found.values())
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0] > 1.5


@pytest.mark.wide
def test_the_command_compares_shapes(tmp_path, capsys):
    write_model(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    lines = ({"prompt": p} for p in ("the cat", "a b c", "in the", "abc"))
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        f"--model={tmp_path}", f"--drafter={tmp_path}/heads", f"--prompts={prompts}",
        f"--out={tmp_path}/out", "--max_new_tokens=40", "--sizes=2,4", "--rounds=1",
        "--one_depth=3", "--dense=2",
    ]  # fmt: skip
    assert shapes.main(arguments) == 0
    found = json.loads((tmp_path / "out" / "tree_shapes.json").read_text())
    assert [row["nodes"] for row in found["fitted"]] == [1, 2, 4]
    assert [row["nodes"] for row in found["one_depth"]] == [3]
    dense = [Tree.cartesian(widths).n_nodes for widths in found["widths"]]
    assert dense == [row["nodes"] for row in found["dense"]] and len(dense) == 2
    assert all(row["step_seconds"] > 0 for row in found["dense"])
    assert (tmp_path / "out" / "dense.png").stat().st_size > 1000
    assert "one depth" in capsys.readouterr().out
