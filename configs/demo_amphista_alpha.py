"""Amphista-alpha heads for the demo: as demo_amphista.py, with two auto-embedding blocks.

    python train.py --config=configs/demo_amphista_alpha.py --workdir=work/demo/amphista_alpha

With the backbone and the text of demo_medusa.py. LM head shared with the
backbone: 2.4 M parameters, 4.9 MB in bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    fields = {
        "heads.n_layers": 1,
        "heads.stage_d_ff": 640,
        "train.lambda_decay": 1.0,
        "train.label_weight": 0.1,
        "train.teacher_weight": 1.0,
        "train.steps": 1200,
    }
    return in_family(medusa_config(), "amphista_alpha", fields)
