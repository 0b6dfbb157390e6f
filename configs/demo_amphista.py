"""Amphista heads for the demo: 4 heads, two adaptation layers, one auto-embedding block.

    python train.py --config=configs/demo_amphista.py --workdir=work/demo/amphista

With the backbone and the text of demo_medusa.py. LM head shared with the
backbone: 2.2 M parameters, 4.3 MB in bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family

FIELDS = {
    "heads.n_layers": 1,
    "heads.stage_d_ff": 640,
    "train.lambda_decay": 1.0,
    "train.label_weight": 0.1,
    "train.teacher_weight": 1.0,
    "train.steps": 1200,
}


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    return in_family(medusa_config(), "amphista", FIELDS)
