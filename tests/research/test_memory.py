"""Memory of compiled programs compared with sums by hand, on eight simulated devices in a child process."""

import os
from importlib.metadata import version

import jax
import pytest
from children import printed_by
from training_setup import ROOT

from medusa_jax.devices.platforms import simulate_devices
from research.counted import CPU_ONLY, total_bytes

pytestmark = pytest.mark.wide

CHILD = r"""
import json, os, sys
import jax
import jax.numpy as jnp
from medusa_jax.devices.platforms import simulate_devices
from medusa_jax.sharding import make_mesh

simulate_devices(8)
from medusa_jax.commands.train import load_config
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.evaluate.compiled import compiled_loop
from medusa_jax.heads.registry import make_drafter
from research import counted, scaling
from medusa_jax.training import dry
from medusa_jax.tree.tree import Tree

arch = LlamaConfig(vocab_size=8192, d_model=256, n_layers=2, n_heads=8, n_kv_heads=8, head_dim=32,
                   d_ff=2048, max_position=512)
report = {}
for name, heads in (("m1", 2), ("eagle3", 1)):
    cfg = load_config(f"{sys.argv[1]}/vicuna7b_{name}.py")
    cfg.model.path, cfg.model.arch, cfg.mesh, cfg.dry_run = "", arch, (1, 8, 1), True
    cfg.data.seq_len, cfg.train.loss_chunk, cfg.heads.n_heads = 512, 64, heads
    cfg.train.batch_size, cfg.train.accumulation, cfg.train.levels = 64, 16, 1
    shapes = dry.step_shapes(cfg)
    trained = dry.measure(cfg, shapes)
    sizes = [counted.training_bytes(cfg, shapes), trained, trained["batch"]]
    report[f"training of {name}"] = sizes

drafter, tree = make_drafter(HeadsConfig(n_heads=2), arch), Tree.cartesian([3, 2])
for dtype, rows in ((jnp.float32, 4), (jnp.bfloat16, 1)):
    program, variables, state = compiled_loop(
        arch, drafter, tree, make_mesh((1, 1, 8)), rows, 200, dtype
    )
    found = program.memory_analysis()
    sizes = {"argument_bytes": found.argument_size_in_bytes}
    sizes["total_bytes"] = found.argument_size_in_bytes + found.temp_size_in_bytes
    held = scaling.decoding_bytes(variables, state, tree.n_nodes, arch.vocab_size)
    report[f"decoding of {rows} in {dtype.__name__}"] = [held, sizes, None]
report["flags"] = os.environ["XLA_FLAGS"]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    # What is measured is the program that users compile.
    return printed_by(CHILD, ROOT / "configs", JAX_DISABLE_MOST_OPTIMIZATIONS="0")


DECODING = ["decoding of 4 in float32", "decoding of 1 in bfloat16"]


# One level of EAGLE-3: a CPU keeps what `jax.checkpoint` would compute again in the others.
TRAINING = ["training of m1", "training of eagle3"]


@pytest.mark.parametrize("kind", [*TRAINING, *DECODING])
def test_compiled_memory_is_what_is_counted(report, kind):
    """Parameters, moments, caches exactly; with logits, gradients, gathered kernels to 10%.

    Copies that only a CPU makes are counted as jaxlib 0.10 makes them; later ones leave some out.
    """
    counted, compiled, batch = report[kind]
    held = ("parameters", "moments", "batch", "caches", "other state")
    arguments = sum(counted.get(name, 0) for name in held)
    assert arguments == pytest.approx(compiled["argument_bytes"], rel=1e-3)
    most = least = total_bytes(counted, "cpu")
    if not version("jaxlib").startswith("0.10."):
        least -= counted[CPU_ONLY]
    assert 0.9 * least < compiled["total_bytes"] < most / 0.9
    # Microbatches in a loop, before which the weights of all layers could be gathered.
    assert kind in DECODING or batch == [2, 32, 512]
    # Without the count of temporaries neither would agree.
    assert arguments < 0.5 * compiled["total_bytes"] or kind in DECODING


def test_what_a_cpu_widens_is_counted_by_itself(report):
    """The embedding, and draft heads that are multiplied with a single row."""
    copies = [report[kind][0][CPU_ONLY] for kind in DECODING]
    embedding, heads = 1024 * 256 * 4, 2 * 256 * (1024 + 32) * 4
    assert copies == [0, embedding + heads]


def test_programs_are_planned_by_a_scheduler_that_waits(report, monkeypatch):
    """Unless the user says which."""
    scheduler = "--xla_cpu_enable_concurrency_optimized_scheduler="
    assert report["flags"].endswith(f"{scheduler}false")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("XLA_FLAGS", f"{scheduler}true")
    simulate_devices(8)
    assert os.environ["XLA_FLAGS"] == f"{scheduler}true"
