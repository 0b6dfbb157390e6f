"""How often weights are gathered over fsdp, on eight simulated devices in a child process."""

import json
from pathlib import Path

import pytest
from children import output_of

CHILD = r"""
import json, sys
from medusa_jax.sharding import simulate_devices

simulate_devices(8)
import jax
from medusa_jax.commands.train import load_config
from medusa_jax.config import LlamaConfig
from medusa_jax.training import dry

cfg = load_config(sys.argv[1])
cfg.model.path, cfg.mesh, cfg.dry_run, cfg.train.dtype = "", (1, 8, 1), True, "bfloat16"
cfg.model.arch = LlamaConfig(vocab_size=256, d_model=64, n_layers=1, n_heads=8, n_kv_heads=8,
                             head_dim=8, d_ff=512, max_position=64)
cfg.data.seq_len, cfg.train.loss_chunk, cfg.heads.n_heads, cfg.lora.rank = 32, 32, 1, 1
cfg.train.batch_size, cfg.train.accumulation, cfg.optim.name = 8, 1, "adamw"
shapes = dry.step_shapes(cfg)
layers = [x for name, x in shapes.frozen["backbone"].items() if name.startswith("layers_")]
sent = dry.measure(cfg, shapes)["sent_bytes"]["all-gather"]
print(json.dumps([sent, 4 * sum(x.size for x in jax.tree.leaves(layers))]))
"""


@pytest.mark.wide
def test_a_teacher_s_pass_gathers_its_own_weights():
    """Gathered once for both passes, the kernels of all layers would wait between them."""
    config = Path(__file__).parents[2] / "configs" / "vicuna33b.py"
    # As users compile it: without XLA's passes nothing is gathered once for two.
    said = output_of(CHILD, config, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    sent, layers = json.loads(said.splitlines()[-1])
    # The student's pass, the teacher's and the one back, and little else; a device takes seven eighths of
    # what it gathers from the others.
    assert 3 <= sent / (7 / 8 * layers) < 3.5
