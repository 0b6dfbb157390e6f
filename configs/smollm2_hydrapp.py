"""Hydra++ heads for SmolLM2-135M-Instruct: 4 heads after a prefix layer, over 8,192 tokens.

    python train.py --config=configs/smollm2_hydrapp.py --workdir=work/smollm2/hydrapp

Text, draft vocabulary and cached hidden states are those of smollm2_medusa.py. 8.2 M
parameters.
"""

from configs.smollm2_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.hydrapp import HydraPPConfig


def get_config() -> Config:
    """Heads on the frozen model."""
    cfg = medusa_config()
    cfg.heads = HydraPPConfig(
        n_heads=4, n_layers=1, dropout=0.0, lm_head="shared", draft_vocab=8192, skip="fixed"
    )
    cfg.optim.lr = 2e-3
    return cfg
