"""Parts of single studies: settings, variants, shapes, ties, random weights, costs from shapes, growth, roofline."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from tiny import tiny_arch
from training_setup import ROOT
from trees import all_trees

from medusa_jax.api import Model, weightless
from medusa_jax.commands import train as cli
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.evaluate import roofline
from medusa_jax.files.shapes import SHAPES
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.model.stored import Storage
from medusa_jax.training import dry
from medusa_jax.tree import growth
from medusa_jax.tree.tree import Tree
from research import draft_cost, planning, ties
from research import paper_growth as fit
from research import roofline as measure
from research import tree_shapes as shapes
from research import weights as at_random
from research.family.command import refuse_other
from research.scaling import mesh_for


def test_a_training_with_other_settings_is_not_taken_for_this_one(tmp_path):
    asked = {room: {} for room in ("heads", "data", "optim", "lora")}
    asked["train"] = {"steps": 1200, "eval_every": 150, "dtype": "bfloat16"}
    found = asked | {"train": {"steps": 1200, "eval_every": 75, "dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(found))
    refuse_other(tmp_path, asked)  # how often it was watched does not matter
    asked["train"]["steps"] = 400
    with pytest.raises(UserError, match=r"with train.steps 1200 \(asked: 400\)"):
        refuse_other(tmp_path, asked)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"no readable config.json"):
        refuse_other(tmp_path, asked)


def test_trees_of_one_depth_leave_deeper_heads_out():
    """Ranks fall off geometrically, in four texts."""

    def grow(texts):
        return growth.order_by_steps(texts, 127, copies=False)

    rng = np.random.default_rng(0)
    ranks = (rng.geometric(0.5, (300, 5)) - 1 for _ in range(4))
    five = [growth.Recorded.of_heads(r) for r in ranks]
    sizes = (22, 35, 45, 64)
    found = shapes.of_one_depth(five, grow, (*sizes, 200))
    assert [tree.n_nodes for tree in found] == list(sizes)
    assert [tree.depth for tree in found] == [4] * 4
    four = shapes.of_one_depth([shapes.cut(text, 4) for text in five], grow, sizes)
    assert found == four
    lengths = list(found.values())
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0] > 1.5


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


@pytest.mark.parametrize("weights", ["", *wide("int8")])
@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_lie_as_decoding_reads_them(weights, tied):
    config, storage = replace(TINY, tie_embeddings=tied), Storage(0, weights)
    drafter = make_drafter(drafter_class("hydrapp").Config(n_heads=4), config)
    found = {
        "backbone": at_random.random_backbone(config, jnp.bfloat16, storage),
        "heads": at_random.random_heads(drafter, jnp.bfloat16, storage),
    }
    wanted = weightless.abstract_variables(config, drafter, jnp.bfloat16, storage)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), t) for t in (found, wanted)]
    assert shapes[0] == shapes[1]
    values = [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]
    assert all(np.isfinite(v).all() and v.any() for v in values)


# Percent of one backbone pass, 7B, weights read once.
EXPECTED = {
    "medusa": 9.0,
    "amphista": 17.0,
    "amphista, rank 256": 9.5,
    "hydra++ (layers tied, as released)": 19.0,
}


@pytest.mark.wide
def test_shares_of_a_backbone_pass():
    found = draft_cost.measure("llama-7b", 512, list(EXPECTED))
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
    whole = draft_cost.pass_cost(arch, tree, 128)
    promised = draft_cost.backbone_cost(arch, tree, 128)
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
        few = replace(heads, draft_vocab=64)
        costs[kind] = draft_cost.draft_bytes(few, arch, tree, 128)
        assert costs[kind][1:] == (4.0 * parameters, parameters)
        assert costs[kind][0] < 0.75 * whole[0]
    assert costs["own"][0] - costs["shared"][0] > 0.8 * 4 * 3 * columns


@pytest.mark.parametrize("shape", ["llama-7b", "llama-33b", "llama3.1-70b"])
def test_decoding_meshes_divide_what_they_split(shape):
    arch = SHAPES[shape]
    for devices in (1, 8, 64):
        data, fsdp, tensor = mesh_for(arch, devices)
        assert data * fsdp * tensor == devices and fsdp == 1
        for size in (arch.n_heads, arch.n_kv_heads, arch.d_ff, arch.vocab_size):
            assert size % tensor == 0
    # 52 heads: four devices at most.
    assert tensor == (4 if shape == "llama-33b" else 8)


# Billions of weights that a token is multiplied with: layers of Vicuna-7B, its LM head, five heads.
LAYERS, LM_HEAD, HEADS = 6.4764, 0.1311, 5 * (0.1311 + 0.0168)
# Scores and values: 2 x 32 layers x 4096 x 2048 positions, half of them seen.
ATTENTION = 2 * 32 * 4096 * 2048 / 1e9


@pytest.mark.parametrize(
    ("name", "more", "billions"),
    [
        ("vicuna7b_m1", (), 2 * LAYERS + ATTENTION + 6 * HEADS),
        # Kept hidden states: the heads alone, whose gradients take two products more.
        ("vicuna7b_m1", ("--config.data.cache_features=bfloat16",), 6 * HEADS),
        # QLoRA: forward, again, and for inputs; 80 million weights of adapters.
        (
            "vicuna7b_m2", (),
            3 * (2 * LAYERS + ATTENTION) + 4 * LM_HEAD + 6 * HEADS + 6 * 0.0811,
        ),
        # One pass of its layer, whatever the depth: LM head there and back, and the teacher's.
        (
            "vicuna7b_eagle", ("--config.data.cache_features=bfloat16",),
            6 * 0.2359 + 4 * LM_HEAD + 2 * LM_HEAD,
        ),
        # The second and third level again in the backward pass.
        (
            "vicuna7b_eagle",
            ("--config.data.cache_features=bfloat16", "--config.train.levels=3"),
            (6 + 8 + 8) * 0.2359 + 3 * 4 * LM_HEAD + 2 * LM_HEAD,
        ),
    ],
)  # fmt: skip
def test_arithmetic_of_a_token(name, more, billions):
    given = f"--config={ROOT}/configs/{name}.py", "--workdir=w", "--config.mesh=1,1,1"
    cfg = cli.parse([*given, *more])
    found = planning.flops_per_token(cfg, dry.step_shapes(cfg).state.params)
    assert found / 1e9 == pytest.approx(billions, rel=2e-3)


BLOCKS = LlamaConfig(64, 64, 2, 4, 2, 16, 128, 128)


def test_the_timed_products_are_those_that_are_counted():
    """FLOPs by XLA and bytes by shapes; every group, and linear layers once for all lengths."""
    found = list(measure.cases(BLOCKS, (2,), (8, 12), (3,), 4))
    assert {c.operator.group for c in found} == set(roofline.GROUPS)
    alike = [(c.operator.name, c.phase, c.queries) for c in found if c.phase != "prefill"]
    assert alike.count(("up", "tree", 3)) == 1 and alike.count(("qk", "tree", 3)) == 2
    for case in found:
        function, shapes = measure.product_of(BLOCKS, case, "float32")
        first, second = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
        if case.operator.group != roofline.ATTENTION:
            first = {"kernel": first}
        lowered = jax.jit(function).lower(first, second)
        assert lowered.cost_analysis()["flops"] == case.operator.flops, case
        moved = math.prod(lowered.out_info.shape) + sum(map(math.prod, shapes))
        assert 4 * moved == case.operator.bytes, case


def test_a_fit_finds_the_roof_that_timings_were_made_from():
    true = roofline.Roof(3e13, 7e11, 4e-6)
    made = [roofline.linear("x", "g", rows, 4096, 4096) for rows in (1, 8, 64, 512, 4096)]
    made += [roofline.linear("x", "g", 8, n, n) for n in (64, 128, 256)]
    fields = "flops", "bytes", "seconds"
    records = [dict(zip(fields, (o.flops, o.bytes, true.seconds(o)))) for o in made]
    fit = measure.fit_roof(records)
    found = (fit.roof.flops, fit.roof.bandwidth, fit.roof.overhead)
    assert found == pytest.approx((3e13, 7e11, 4e-6), rel=1e-3)
    assert fit.error < 1e-3 and fit.bound == (3, 2, 3)
    only = measure.fit_roof(records[:2] + records[5:])  # none is bound by arithmetic
    assert only.bound[0] == 0
    (line,) = measure.fit_table({"g": only}).splitlines()[2:]
    assert " ".join(line.split()).startswith("| g | - | 700.0 |")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_product_growth_equals_exhaustive_search(size: int) -> None:
    accuracy = np.array([[0.5, 0.2, 0.1], [0.4, 0.25, 0.05], [0.3, 0.1, 0.1]])

    def worth(tree: Tree) -> float:
        return sum(
            float(np.prod([accuracy[d, r] for d, r in enumerate(path)]))
            for path in tree.choices
        )

    best = max(worth(tree) for tree in all_trees(3, 3, size))
    grown = Tree.from_choices(fit.product_growth(accuracy, size))
    assert worth(grown) == pytest.approx(best)
