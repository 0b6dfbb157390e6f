"""Amphista-alpha heads for SmolLM2-135M-Instruct: as smollm2_amphista.py, two attention layers.

    python train.py --config=configs/smollm2_amphista_alpha.py --workdir=work/smollm2/amphista_alpha

Text, draft vocabulary and cached hidden states are those of smollm2_medusa.py. 8.9 M
parameters.
"""

from configs.smollm2_amphista import get_config as amphista_config
from medusa_jax.config import Config
from medusa_jax.heads.amphista import AmphistaAlphaConfig


def get_config() -> Config:
    """Heads on the frozen model."""
    cfg = amphista_config()
    cfg.heads = AmphistaAlphaConfig(
        n_heads=4, lm_head="shared", draft_vocab=8192, stage_d_ff=512
    )
    return cfg
