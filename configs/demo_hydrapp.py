"""Hydra++ heads for the demo: 4 heads of 4 hidden layers after a prefix layer.

    python train.py --config=configs/demo_hydrapp.py --workdir=work/demo/hydrapp

With the backbone and the text of demo_medusa.py, with the backbone's own
distribution as the target. LM head shared with the backbone, a skip connection without
weights: 2.4 M parameters, 4.9 MB in bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.hydrapp import HydraPPConfig


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    cfg = medusa_config()
    cfg.heads = HydraPPConfig(
        n_heads=4, n_layers=4, dropout=0.1, lm_head="shared", skip="fixed"
    )
    cfg.optim.lr, cfg.optim.weight_decay = 2e-3, 0.1
    cfg.train.lambda_decay = 1.0
    cfg.train.label_weight, cfg.train.teacher_weight = 0.0, 1.0
    cfg.train.steps = 1200
    return cfg
