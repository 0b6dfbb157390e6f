"""Hydra heads for the demo: 4 heads of 2 hidden layers.

    python train.py --config=configs/demo_hydra.py --workdir=work/demo/hydra

With the backbone and the text of demo_medusa.py, with the backbone's own
distribution as the target: for use, not for a comparison with other drafters. LM heads of rank
64, a skip connection without weights: 2.3 M parameters, 4.6 MB in bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    fields = {
        "heads.lm_head": "low_rank",
        "heads.rank": 64,
        "train.lambda_decay": 1.0,
        "train.label_weight": 0.1,
        "train.teacher_weight": 1.0,
        "train.steps": 1800,
    }
    return in_family(medusa_config(), "hydra", fields)
