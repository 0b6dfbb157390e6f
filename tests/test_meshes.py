"""Training on every kind of mesh against one device, in float64; the thin comparison is `training/test_devices.py`.

Each test is one child process with eight simulated CPU devices.
"""

from pathlib import Path

import pytest
from children import devices, printed_by
from training_setup import write_tokens

MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2))
pytestmark = pytest.mark.slow

TRAINING = r"""
import json, sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
jax.config.update("jax_enable_x64", True)
from medusa_jax.heads.registry import drafter_class
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import init_sharded, make_mesh, param_shardings
from medusa_jax.training import step
from medusa_jax.training.data.rows import TokenRows
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.placement import compile_step, microbatches
from medusa_jax.training.plan import RunPlan
from test_meshes import MESHES
from training_setup import abstract_batch, groups_of, stage_of, tiny_config, training_arch

STEPS = 20
ARCH = training_arch(d_model=32, n_heads=8, n_kv_heads=8, head_dim=4, d_ff=64)


def configurations(tokens):
    def of(stage, **train):
        cfg = tiny_config(tokens, stage, steps=STEPS, **train)
        cfg.model.arch, cfg.optim.name = ARCH, "adamw"
        cfg.train.batch_size, cfg.train.accumulation = 16, 16  # one row a device at a time
        return cfg

    lora, full = of("medusa2", remat=True), of("medusa2")
    # No dropout and no noise: both go by a row's place in its microbatch, which a mesh changes.
    lora.lora.rank, lora.lora.dropout = 4, 0.0
    halves = of("medusa1", teacher_weight=1.0)
    halves.heads = drafter_class("amphista").Config(drafter="amphista", n_heads=2)
    inside = of("medusa1", teacher_weight=1.0, label_weight=0.0, levels=2,
                induction_weight=0.5)
    inside.heads = drafter_class("eagle3").Config(n_heads=2, fc_norm=True)
    blocks = of("medusa1", distance_weight=1.0, label_weight=0.1, confidence_weight=1.0,
                anchors=7)
    sizes = {"n_heads": 2, "n_layers": 1, "markov_rank": 8}
    blocks.heads = drafter_class("dspark").Config(**sizes, confidence=True)
    return {"dspark": blocks, "lora": lora, "full": full, "amphista": halves, "eagle3": inside}


def run(cfg, shape):
    # Losses of each step, the state after the last, microbatches.
    rng = np.random.default_rng(0)

    def moved(x):
        # Nowhere zero: what starts as zero would hide gradients.
        return np.asarray(x, "float64") + 0.1 * rng.standard_normal(x.shape)

    def placed(tree):
        return jax.tree.map(jax.device_put, tree, param_shardings(mesh, tree))

    mesh = make_mesh(shape)
    cfg.train.dtype = "float64"
    cfg = RunPlan(cfg, mesh)
    backbone = init_sharded(mesh, lambda k: init_params(ARCH, k), jax.random.key(0))
    backbone = placed(jax.tree.map(moved, backbone))
    trained = groups_of(cfg)
    frozen = {} if "backbone" in trained else {"backbone": backbone}
    start = {"backbone": backbone} if "backbone" in trained else {}
    stage = stage_of(cfg, STEPS, mesh)
    optimizer = make_optimizer(cfg.optim, trained, STEPS)
    state = step.init_state(stage, optimizer, mesh, frozen, 0, start)
    params = placed(jax.tree.map(moved, state.params))
    state = state._replace(params=params, opt=placed(jax.jit(optimizer.init)(params)))
    fn = step.make_step(stage, optimizer, make_schedule(cfg.optim, STEPS), 0, mesh)
    compiled = compile_step(fn, state, frozen, abstract_batch(cfg, mesh), mesh)
    rows = TokenRows(cfg.data.source, cfg.data, ARCH.vocab_size)
    losses = []
    for n in range(STEPS):
        batch = rows.batch(range(16 * n, 16 * n + 16))
        batch = microbatches(mesh, batch, cfg.train.accumulation)
        state, metrics = compiled(state, frozen, batch)
        losses.append(np.append(metrics["loss"], metrics["gradient_norm"]))
    return np.array(losses), state, cfg.train.accumulation


def apart(trees):
    # The largest difference of two trees' arrays, in parts of the array's largest value.
    pairs = zip(*map(jax.tree.leaves, trees), strict=True)
    return max(float(np.max(np.abs(x - np.asarray(y))) / np.max(np.abs(y))) for x, y in pairs)


ends = {}
for shape in ((1, 1, 1), *MESHES):
    losses, state, accumulation = run(configurations(sys.argv[2])[sys.argv[3]], shape)
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"float64"}
    ends[shape] = (losses, jax.tree.map(np.asarray, state.params), accumulation)
alone = ends.pop((1, 1, 1))
report = {
    str(shape): {
        "losses": float(np.max(np.abs(losses / alone[0] - 1))),
        "params": apart((params, alone[1])),
        "accumulation": accumulation,
    }
    for shape, (losses, params, accumulation) in ends.items()
}
print(json.dumps(report))
"""


@pytest.mark.parametrize("kind", ["lora", "full", "amphista", "eagle3", "dspark"])
def test_training_is_that_of_one_device(kind, tmp_path):
    """Adapters, all parameters, heads with attention, levels that feed each other: twenty steps."""
    support = Path(__file__).parent / "support"
    given = TRAINING, support, write_tokens(tmp_path / "tokens"), kind
    report = printed_by(*given, xla_flags=devices(8))
    accumulation = {"(8, 1, 1)": 2, "(1, 8, 1)": 2, "(1, 1, 8)": 16, "(2, 2, 2)": 4}
    assert report.keys() == accumulation.keys()
    for shape, found in report.items():
        assert found["accumulation"] == accumulation[shape]
        assert found["losses"] < 1e-9 and found["params"] < 1e-9, (shape, found)
