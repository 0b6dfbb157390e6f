"""Training over several devices: the same losses, and every device with its own rows only.

One child process with eight simulated CPU devices runs what needs them.
"""

import dataclasses
import re

import numpy as np
import pytest
from children import devices, printed_by
from training_setup import ROOT, records, run, tiny_config

from medusa_jax.hlo.collectives import collectives

pytestmark = pytest.mark.wide

CHILD = r"""
import json, os, sys
import jax
from test_devices import MESHES, configurations
from medusa_jax.training import prepare, trainer
from medusa_jax.training.plan import RunPlan

tokens, model, workdir = sys.argv[1:]
COMPILE = prepare.compile_step
products = {}
for name, cfg in configurations(tokens, model).items():
    compile_step = COMPILE

    def watched(step_fn, state, frozen, batch, mesh):
        compiled = compile_step(step_fn, state, frozen, batch, mesh)
        products[name] = compiled.as_text()
        return compiled

    prepare.compile_step = watched
    cfg.mesh, cfg.workdir = MESHES[name], os.path.join(workdir, name)
    os.makedirs(cfg.workdir)
    trainer.train_plan(RunPlan(cfg))
print(json.dumps(products))
"""

ROWS, LENGTH, STEPS = 8, 24, 4
# Of each run: devices along (data, fsdp, tensor).
MESHES = {"heads": (2, 2, 2), "deeper": (1, 8, 1), "both": (1, 4, 2)}


def parts(name):
    """Into how many parts the rows of a run are split."""
    data, fsdp, _ = MESHES[name]
    return data * fsdp


def configurations(tokens, model):
    """Heads on a backbone, a backbone with more layers, adapters with recomputed blocks
    and heads with a draft vocabulary."""
    heads = tiny_config(tokens, "medusa1", steps=STEPS, save_every=STEPS)
    deeper = tiny_config(tokens, "backbone", steps=STEPS, save_every=STEPS)
    deeper.model.add_layers = 1
    both = tiny_config(tokens, "medusa2", steps=STEPS, save_every=STEPS, remat=True)
    both.lora.rank = 4
    both.heads = dataclasses.replace(both.heads, lm_head="shared", draft_vocab=40)
    for cfg in (heads, deeper, both):
        cfg.model.path, cfg.data.seq_len, cfg.optim.name = model, LENGTH, "adamw"
    return {"heads": heads, "deeper": deeper, "both": both}


@pytest.fixture(scope="module")
def eight(tokens, model, tmp_path_factory):
    """What the child saw, and where it worked."""
    workdir = tmp_path_factory.mktemp("eight")
    return printed_by(CHILD, tokens, model, workdir, xla_flags=devices(8)), workdir


@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_give_the_same_losses(eight, tokens, model, tmp_path, name):
    """Against one device."""
    run(configurations(tokens, model)[name], tmp_path)
    losses = [[r["loss"] for r in records(d)] for d in (eight[1] / name, tmp_path)]
    assert np.shape(losses)[1] == STEPS
    np.testing.assert_allclose(*losses, rtol=2e-4)


@pytest.mark.parametrize("name", MESHES)
def test_every_device_computes_its_own_rows_only(eight, name):
    """In the compiled step no product has the positions of all rows."""
    text = eight[0][name]
    results = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
    rows = [int(dims.split(",")[0]) for dims in results if dims.count(",") == 1]
    assert rows.count(ROWS * LENGTH // parts(name)) >= 7
    assert ROWS * LENGTH not in rows


@pytest.mark.parametrize("name", ["heads", "deeper"])
def test_nothing_is_summed_over_the_rows_of_all_devices_in_a_loop(eight, name):
    """Gradients of the loss add up on each device over its chunks, and are summed once."""
    among_rows = [c for c in collectives(eight[0][name]) if c.group == parts(name)]
    assert len(among_rows) > 2
    assert [c for c in among_rows if c.trips] == []


# How often weights are gathered over fsdp, on eight simulated devices in a child process.


GATHERS = r"""
import json, sys
from medusa_jax.devices.platforms import simulate_devices

simulate_devices(8)
import jax
from medusa_jax.commands.train import load_recipe
from medusa_jax.config import LlamaConfig
from medusa_jax.training import dry
from medusa_jax.training.plan import RunPlan

cfg = load_recipe(sys.argv[1]).get_config()
cfg.model.path, cfg.mesh, cfg.dry_run, cfg.train.dtype = "", (1, 8, 1), True, "bfloat16"
cfg.model.arch = LlamaConfig(vocab_size=256, d_model=64, n_layers=1, n_heads=8, n_kv_heads=8,
                             head_dim=8, d_ff=512, max_position=64)
cfg.data.seq_len, cfg.train.loss_chunk, cfg.heads.n_heads, cfg.lora.rank = 32, 32, 1, 1
cfg.train.batch_size, cfg.train.accumulation, cfg.optim.name = 8, 1, "adamw"
plan = RunPlan(cfg, dry=True)
shapes = dry.shapes_of(plan)
layers = [x for name, x in shapes.frozen["backbone"].items() if name.startswith("layers_")]
sent = dry.figures(plan, dry.compile_step(*shapes))["sent_bytes"]["all-gather"]
print(json.dumps([sent, 4 * sum(x.size for x in jax.tree.leaves(layers))]))
"""


def test_a_teacher_s_pass_gathers_its_own_weights():
    """Gathered once for both passes, the kernels of all layers would wait between them."""
    config = ROOT / "configs" / "vicuna33b.py"
    # As users compile it: without XLA's passes nothing is gathered once for two.
    sent, layers = printed_by(GATHERS, config, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    # The student's pass, the teacher's and the one back, and little else; a device takes seven eighths of
    # what it gathers from the others.
    assert 3 <= sent / (7 / 8 * layers) < 3.5
