"""The wide comparison: every kind of mesh against one device, in float64, training and decoding.

The thin ones are `test_sharding.py` and `training/test_devices.py`. Each test is one child process
with eight simulated CPU devices.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from children import devices, environment

MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2))
pytestmark = pytest.mark.slow

TRAINING = r"""
import dataclasses, json, sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import drafter_class
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import init_sharded, make_mesh, param_shardings
from medusa_jax.training import checks, step
from medusa_jax.training.data.rows import TokenRows
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.stage import make_stage
from test_meshes import MESHES
from training_setup import tiny_arch, tiny_config

STEPS = 20
ARCH = tiny_arch(d_model=32, n_heads=8, n_kv_heads=8, head_dim=4, d_ff=64)


def configurations(tokens):
    def of(stage, **train):
        cfg = tiny_config(tokens, stage, steps=STEPS, dtype="float64", **train)
        cfg.model.arch, cfg.optim.name = ARCH, "adamw"
        cfg.train.batch_size, cfg.train.accumulation = 16, 16  # two rows a device: one and two
        return cfg

    heads, lora, full = of("medusa1"), of("medusa2", remat=True), of("medusa2")
    # No dropout and no noise: both go by a row's place in its microbatch, which a mesh changes.
    lora.lora.rank, lora.lora.dropout = 4, 0.0
    attending = of("medusa1", teacher_weight=1.0, label_weight=0.1)
    attending.heads = drafter_class("hydrapp").Config(
        drafter="hydrapp", n_heads=2, n_layers=2, dropout=0.0
    )
    halves = of("medusa1", teacher_weight=1.0)
    halves.heads = drafter_class("amphista").Config(drafter="amphista", n_heads=2)
    return {"medusa1": heads, "lora": lora, "full": full, "hydrapp": attending,
            "amphista": halves}


def wide(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, tree
    )


def run(cfg, shape):
    mesh = make_mesh(shape)
    checks.fit_accumulation(cfg, mesh)
    checks.check(cfg, mesh)
    backbone = wide(init_sharded(mesh, lambda k: init_params(ARCH, k), jax.random.key(0)))
    trained = trained_groups(cfg)
    frozen = {} if "backbone" in trained else {"backbone": backbone}
    start = {"backbone": backbone} if "backbone" in trained else {}
    stage = make_stage(cfg, STEPS, mesh)
    schedule = make_schedule(cfg.optim, STEPS)
    optimizer = make_optimizer(cfg.optim, trained, STEPS)
    first = step.init_state(stage, optimizer, mesh, frozen, 0, start)
    params = jax.tree.map(jax.device_put, wide(first.params), param_shardings(mesh, first.params))
    opt = jax.jit(optimizer.init)(params)
    opt = jax.tree.map(jax.device_put, opt, param_shardings(mesh, opt))
    state = first._replace(params=params, opt=opt)
    fn = step.make_step(stage, optimizer, schedule, 0)
    compiled = step.compile_step(fn, state, frozen, step.abstract_batch(cfg, mesh), mesh)
    rows = TokenRows(cfg.data.source, cfg.data, ARCH.vocab_size)
    losses = []
    for n in range(STEPS):
        batch = rows.batch(n * 16, 16)
        placed = step.microbatches(mesh, batch, cfg.train.accumulation)
        state, metrics = compiled(state, frozen, placed)
        losses.append(np.append(metrics["loss"], metrics["gradient_norm"]).tolist())
    flat = [np.asarray(x).ravel() for x in jax.tree.leaves(state.params)]
    assert all(x.dtype == np.float64 for x in flat)
    return losses, np.concatenate(flat), cfg.train.accumulation


report = {}
for name in configurations(""):
    alone = run(configurations(sys.argv[2])[name], (1, 1, 1))
    for shape in MESHES:
        try:
            losses, params, accumulation = run(configurations(sys.argv[2])[name], shape)
        except UserError as error:
            report[f"{name} {shape}"] = {"refused": str(error)}
            continue
        report[f"{name} {shape}"] = {
            "losses": float(np.max(np.abs(np.divide(losses, alone[0]) - 1))),
            "params": float(np.max(np.abs(params - alone[1])) / np.max(np.abs(alone[1]))),
            "accumulation": [alone[2], accumulation],
        }
print(json.dumps(report))
"""

DECODING = r"""
import json, sys
import jax
from test_meshes import MESHES
import medusa_jax
from medusa_jax import Options

jax.config.update("jax_enable_x64", True)
texts = ["the cat and", "in", "abc", "the", "cab", "a b", "and", "er"]
found = {}
for shape in ((1, 1, 1), *MESHES):
    model = medusa_jax.load(
        sys.argv[1], sys.argv[1] + "/heads", tree="cartesian:3,2", dtype="float64", mesh=shape
    )
    found[str(shape)] = [
        [r.token_ids for r in model.generate(
            texts[:rows],
            [Options(max_new_tokens=12 + 2 * i, temperature=t, seed=3) for i in range(rows)],
        )]
        for rows in (1, 8)
        for t in (0, 0.8)
    ]
print(json.dumps(found))
"""


def child(script, *args):
    command = [sys.executable, "-c", script, *map(str, args)]
    env = environment(devices(8))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_training_is_that_of_one_device(tmp_path):
    """Twenty steps of five kinds: what is logged (in float32) and what is trained (in float64)."""
    training = Path(__file__).parent / "training"
    sys.path.insert(0, str(training))
    from training_setup import write_tokens

    report = child(TRAINING, training, write_tokens(tmp_path / "tokens"))
    assert len(report) == 5 * len(MESHES)
    for kind in ("lora", "full", "hydrapp", "amphista"):
        assert "only Medusa heads" in report.pop(f"{kind} (2, 2, 2)")["refused"]
    for name, found in report.items():
        assert found["params"] < 1e-9 and found["losses"] < 1e-6, (name, found)
        assert found["accumulation"][1] == (16 if "(1, 1, 8)" in name else 2 + 2 * (
            "(2, 2, 2)" in name)), (name, found)  # fmt: skip


def test_decoded_tokens_are_those_of_one_device(tmp_path):
    """Greedy and sampled, one row and eight ragged ones."""
    from tiny_model import write_model

    write_model(tmp_path, n_heads=8, n_kv_heads=8, d_ff=24)
    found = child(DECODING, tmp_path)
    expected = found.pop("(1, 1, 1)")
    assert [len(texts) for texts in expected] == [1, 1, 8, 8] and len(found) == len(MESHES)
    assert len({len(tokens) for tokens in expected[2]}) == 8
    for shape, texts in found.items():
        assert texts == expected, shape
