"""Amphista heads for the demo: 4 heads, two adaptation layers, one auto-embedding block.

    python train.py --config=configs/demo_amphista.py --workdir=work/demo/amphista

Trained on the backbone's text (`work/demo/answers`, see demo_medusa.py). LM head shared with the
backbone: 2.2 M parameters, 4.3 MB in bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.amphista import AmphistaConfig


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    cfg = medusa_config()
    cfg.heads = AmphistaConfig(n_heads=4, lm_head="shared", stage_d_ff=640)
    cfg.optim.lr = 2e-3
    cfg.train.lambda_decay = 1.0
    cfg.train.label_weight, cfg.train.teacher_weight = 0.1, 1.0
    return cfg
