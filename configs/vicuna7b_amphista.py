"""Amphista heads for Vicuna-7B (Li et al. 2025, section 4.1).

    python train.py --config=configs/vicuna7b_amphista.py --workdir=runs/vicuna7b_amphista
    python train.py --config=configs/vicuna7b_amphista.py --config.dry_run   (shapes and memory only)

Four heads, two staged adaptation layers, one auto-embedding block; four epochs of ShareGPT,
learning rate 1e-3, cosine with warm-up. The paper does not give the batch size (64 here), the warm-up
(100 steps) and the weights of its two losses (1 for the backbone's distribution, 0.1 for the text).
1.13 B parameters; `--config.heads.lm_head=low_rank --config.heads.rank=256`, its fastest in table 11,
has 0.64 B.

The ablations of tables 4, 5 and 10 are `--config.heads.` blocks=0 (w/o Auto-embedding),
position_encoding=false, stages=0 (w/o Staged-Adaptation), stages=1, 3, 4, sampled_token=false.

What to expect: on MT-bench, greedy, the paper reports 3.50 tokens per step and 2.44x the speed
of plain decoding on an A100 (Medusa 2.52 and 1.87x, Hydra++ 3.58 and 2.37x).
"""

from configs.vicuna7b_hydra import get_config as hydra_config
from medusa_jax.config import Config
from medusa_jax.heads.amphista import AmphistaConfig


def get_config() -> Config:
    """The recipe; model, data and precision are those of vicuna7b_hydra.py."""
    cfg = hydra_config()
    cfg.heads = AmphistaConfig(n_heads=4, lm_head="own")
    cfg.optim.lr, cfg.optim.warmup_steps = 1e-3, 100
    cfg.train.batch_size, cfg.train.accumulation, cfg.train.epochs = 64, 8, 4
    cfg.train.label_weight, cfg.train.teacher_weight = 0.1, 1.0
    return cfg
