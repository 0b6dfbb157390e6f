"""Parts of single studies: settings, variants, shapes, ties, random weights."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from files import write_lines
from tiny import tiny_arch

from medusa_jax.api import Model, weightless
from medusa_jax.errors import UserError
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.model import quantise
from medusa_jax.model.stored import Storage
from medusa_jax.tree import growth
from medusa_jax.tree.tree import Tree
from research import ties
from research import tree_shapes as shapes
from research import weights as at_random
from research.family.command import refuse_other
from research.recipes import command, variants


def test_a_training_with_other_settings_is_not_taken_for_this_one(tmp_path):
    asked = {room: {} for room in ("heads", "data", "optim", "lora")}
    asked["train"] = {"steps": 1200, "eval_every": 150, "dtype": "bfloat16"}
    found = asked | {"train": {"steps": 1200, "eval_every": 75, "dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(found))
    refuse_other(tmp_path, asked)  # how often it was watched does not matter
    asked["train"]["steps"] = 400
    with pytest.raises(
        UserError, match=r"was trained with train.steps 1200 \(asked: 400\)"
    ):
        refuse_other(tmp_path, asked)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"no readable config.json"):
        refuse_other(tmp_path, asked)


def test_every_arm_names_fields_that_exist(tmp_path):
    from medusa_jax.commands.train import override
    from medusa_jax.training.partition import trained_groups

    flags = command.main.parse(["--original=x", f"--out={tmp_path}"])
    for name, (_, runs) in variants.variants().items():
        shares = [fields["share"] for fields in runs]
        assert not runs or sum(shares) == 1.0, (
            name
        )  # all variants make the same number of steps
        for fields in runs:
            cfg = variants.recipe(flags, 0, tmp_path)
            for field, value in fields.items():
                if "." in field:
                    override(cfg, field, value)
            assert "heads" in trained_groups(cfg.train, cfg.lora), name
            assert cfg.model.quantise in ("", *quantise.KINDS)


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


PROMPTS = ["the cat", "a b c", "in the", "abc"]


@pytest.fixture(scope="module")
def files(directory, tmp_path_factory):
    """A model directory with heads, and a file of prompts."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return directory, write_lines(prompts, ({"prompt": p} for p in PROMPTS))


def test_ties_reports_divergences_and_judges_them(files, tmp_path, capsys, monkeypatch):
    directory, prompts = files
    out = tmp_path / "ties.json"
    arguments = [
        f"--model={directory}", f"--drafter={directory}/heads", f"--prompts={prompts}",
        f"--out={out}", "--tree=chain:2", "--max_new_tokens=40", "--dtype=float32",
    ]  # fmt: skip
    assert ties.main(arguments) == 0
    facts = json.loads(out.read_text())
    assert facts["prompts"] == 4 and facts["not_explained"] == 0
    assert facts["tokens_compared"] <= 160 and "per token" in capsys.readouterr().out

    # A decoder with a defect: plain decoding of another prompt.
    plain = Model.generate

    def wrong(self, batch, options, ids=None, **kwargs):
        if kwargs["tree"] == Tree.none():
            batch = [[*b[:-1], 5] for b in batch]
        return plain(self, batch, options, ids, **kwargs)

    monkeypatch.setattr(Model, "generate", wrong)
    assert ties.main(arguments) == 1
    facts = json.loads(out.read_text())
    assert facts["not_explained"] > 0 and "NO" in capsys.readouterr().out


TINY = tiny_arch(vocab_size=40, n_layers=2, max_position=512)


def drafter_of(name, config):
    return make_drafter(drafter_class(name).Config(drafter=name, n_heads=4), config)


def shapes_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("weights", ["", *wide("int8")])
@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_lie_as_decoding_reads_them(weights, tied):
    config, storage = replace(TINY, tie_embeddings=tied), Storage(0, weights)
    drafter = drafter_of("hydrapp", config)
    found = {
        "backbone": at_random.random_backbone(config, jnp.bfloat16, storage),
        "heads": at_random.random_heads(drafter, jnp.bfloat16, storage),
    }
    wanted = weightless.abstract_variables(config, drafter, jnp.bfloat16, storage)
    assert shapes_of(found) == shapes_of(wanted)
    values = [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]
    assert all(np.isfinite(v).all() and v.any() for v in values)
