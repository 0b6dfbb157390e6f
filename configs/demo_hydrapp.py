"""Hydra++ heads for the demo: 4 heads of 4 hidden layers after a prefix layer.

    python train.py --config=configs/demo_hydrapp.py --workdir=work/demo/hydrapp

With the backbone and the text of demo_medusa.py, with the backbone's own
distribution as the target. LM head shared with the backbone, a skip connection without
weights: 2.4 M parameters, 4.9 MB in bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    fields = {
        "heads.n_layers": 4,
        "heads.dropout": 0.1,
        "optim.weight_decay": 0.1,
        "train.lambda_decay": 1.0,
        "train.label_weight": 0.0,
        "train.teacher_weight": 1.0,
        "train.steps": 1200,
    }
    return in_family(medusa_config(), "hydrapp", fields)
