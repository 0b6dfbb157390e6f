"""Hydra heads for Vicuna-7B, the recipe of the head-to-head with Medusa (Hydra, section 5).

    python train.py --config=configs/vicuna7b_hydra.py --workdir=runs/vicuna7b_hydra
    python train.py --config=configs/vicuna7b_hydra.py --config.dry_run   (shapes and memory only)

Four heads of one hidden layer, one epoch of ShareGPT, batch 128 (of packed rows here, of conversations
in the paper, so an epoch has fewer updates here), learning rate 1e-3, cosine, the text's next tokens as
targets, equal weights for all heads; the paper does not give the warm-up. 0.99 B parameters.

What to expect: on MT-bench, greedy, the paper reports 3.04 tokens per step against 2.58 for Medusa
heads with the same recipe (2.36x and 2.13x the speed of plain decoding on an A100).
"""

from configs.vicuna7b_m1 import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.hydra import HydraConfig


def get_config() -> Config:
    """The recipe; `model.arch` is only for the dry run, training reads the model's."""
    cfg = medusa_config()
    cfg.model.path = "lmsys/vicuna-7b-v1.3"
    cfg.model.arch.max_position, cfg.model.arch.rms_eps = 2048, 1e-6
    cfg.heads = HydraConfig(n_heads=4, n_layers=1, lm_head="own")
    cfg.optim.lr = 1e-3
    cfg.train.batch_size, cfg.train.accumulation = 128, 16
    cfg.train.epochs = 1
    cfg.train.lambda_decay = 1.0
    return cfg
