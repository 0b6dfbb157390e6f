"""EAGLE-3 for Vicuna-7B (Li et al. 2025): a decoder layer that reads inside the backbone.

    python train.py --config=configs/vicuna7b_eagle3.py --workdir=runs/vicuna7b_eagle3
    python train.py --config=configs/vicuna7b_eagle3.py --config.dry_run   (shapes and memory only)

The loss is cross-entropy with the backbone's distribution over seven levels, weighted by 0.8^k. All
32,000 tokens are scored. AdamW (0.9, 0.95), learning rate 5e-5 and 40 epochs are those of the authors'
code, which clips each gradient at 0.5; here their norm is clipped. Batch 32 and the warm-up are ours. The
paper trains on ShareGPT and UltraChat, with answers that the model has written again. 0.43 B parameters.

What to expect: no figure for this model is known to us. Over Spec-Bench's tasks, EAGLE-3 for Vicuna-13B
is 3.02 times as fast as plain decoding, with dynamic trees.
"""

from configs.vicuna7b_hydra import get_config as hydra_config
from medusa_jax.config import Config
from medusa_jax.heads.eagle3 import Eagle3Config


def get_config() -> Config:
    """The recipe; model, data and precision are those of vicuna7b_hydra.py."""
    cfg = hydra_config()
    cfg.heads = Eagle3Config(n_heads=7)
    cfg.optim.lr, cfg.optim.warmup_steps, cfg.optim.b2 = 5e-5, 2000, 0.95
    cfg.optim.clip_norm = 0.5
    cfg.train.batch_size, cfg.train.accumulation, cfg.train.epochs = 32, 8, 40
    cfg.train.label_weight, cfg.train.teacher_weight = 0.0, 1.0
    cfg.train.levels, cfg.train.lambda_decay = 7, 0.8
    return cfg
