"""Hydra heads for the demo: 4 heads of 2 hidden layers.

    python train.py --config=configs/demo_hydra.py --workdir=work/demo/hydra

Trained on the backbone's text (`work/demo/answers`, see demo_medusa.py), with the backbone's
distribution as the target: for use, not for a comparison with other drafters. LM heads of rank 64, a
skip connection without weights: 2.3 M parameters, 4.6 MB in bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.hydra import HydraConfig


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    cfg = medusa_config()
    cfg.heads = HydraConfig(
        n_heads=4, n_layers=2, lm_head="low_rank", rank=64, skip="fixed"
    )
    cfg.optim.lr = 2e-3
    cfg.train.lambda_decay = 1.0
    cfg.train.label_weight, cfg.train.teacher_weight = 0.1, 1.0
    cfg.train.steps = 1800
    return cfg
