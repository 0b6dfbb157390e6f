"""Amphista-alpha heads for SmolLM2-135M-Instruct: two attention layers among the heads.

    python train.py --config=configs/smollm2_amphista_alpha.py --workdir=work/smollm2/amphista_alpha

Text, draft vocabulary and cached hidden states are those of smollm2_medusa.py. 8.9 M
parameters.
"""

from configs.smollm2_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.amphista import AmphistaAlphaConfig


def get_config() -> Config:
    """Heads on the frozen model."""
    cfg = medusa_config()
    cfg.heads = AmphistaAlphaConfig(
        n_heads=4, lm_head="shared", draft_vocab=8192, stage_d_ff=512
    )
    cfg.optim.lr = 2e-3
    return cfg
