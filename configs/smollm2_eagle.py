"""EAGLE-1 for SmolLM2-135M-Instruct: one decoder layer, trees up to four deep, over 8,192 tokens.

    python train.py --config=configs/smollm2_eagle.py --workdir=work/smollm2/eagle

Text, draft vocabulary and cached hidden states are those of smollm2_medusa.py. 4.2 M parameters.
"""

from configs.smollm2_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.eagle import EagleConfig


def get_config() -> Config:
    """The layer on the frozen model; it learns the next hidden state and its distribution."""
    cfg = medusa_config()
    cfg.heads = EagleConfig(n_heads=4, n_layers=1, lm_head="shared", draft_vocab=8192)
    cfg.optim.lr = 1e-3
    cfg.train.feature_weight = 1.0
    # Attention learns to copy what the text repeats, and needs text that does.
    cfg.train.induction_weight = 0.5
    cfg.data.max_repeats = 1.0
    return cfg
