"""Amphista-alpha heads for the demo: as demo_amphista.py, with two auto-embedding blocks.

    python train.py --config=configs/demo_amphista_alpha.py --workdir=work/demo/amphista_alpha

Trained on the backbone's text (`work/demo/answers`, see demo_medusa.py). LM head shared with the
backbone: 2.4 M parameters, 4.9 MB in bfloat16.
"""

from configs.demo_amphista import get_config as amphista_config
from medusa_jax.config import Config
from medusa_jax.heads.amphista import AmphistaAlphaConfig


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    cfg = amphista_config()
    cfg.heads = AmphistaAlphaConfig(n_heads=4, lm_head="shared", stage_d_ff=640)
    return cfg
