"""Amphista-alpha heads for Vicuna-7B: two auto-embedding blocks (Li et al. 2025, A.2.4).

    python train.py --config=configs/vicuna7b_amphista_alpha.py --workdir=runs/vicuna7b_alpha
    python train.py --config=configs/vicuna7b_amphista_alpha.py --config.dry_run   (shapes only)

Otherwise as in vicuna7b_amphista.py. What to expect: on MT-bench, greedy, the paper reports 3.58
tokens per step and 2.63x the speed of plain decoding on an A100 (Amphista 3.50 and 2.44x).
"""

from configs.vicuna7b_amphista import get_config as amphista_config
from medusa_jax.config import Config
from medusa_jax.heads.amphista import AmphistaAlphaConfig


def get_config() -> Config:
    """The recipe; `model.arch` is only for the dry run, training reads the model's."""
    cfg = amphista_config()
    cfg.heads = AmphistaAlphaConfig(n_heads=4, lm_head="own")
    return cfg
