"""Hydra++ heads for Vicuna-7B (Hydra, sections 6 and 7).

    python train.py --config=configs/vicuna7b_hydrapp.py --workdir=runs/vicuna7b_hydrapp
    python train.py --config=configs/vicuna7b_hydrapp.py --config.dry_run   (shapes and memory only)

Four heads of four hidden layers after a prefix layer, trained for 10 epochs on the backbone's
distribution (teacher loss), dropout 0.2, weight decay 0.1. Values not in the paper are from the
authors' published command: batch 32, learning rate 5e-4, 100 warm-up steps, cosine down to a third.
1.40 B parameters; the released checkpoints tie layers 2 to 4 of a head
(`--config.heads.tie_layers=true`, 1.26 B).

Other options of section 6, off here: noise on the hidden states
(`--config.train.hidden_noise=75`), the text's next tokens as targets
(`--config.train.label_weight=1 --config.train.teacher_weight=0`).

What to expect: on MT-bench, greedy, the paper reports 3.70 tokens per step and 2.70x the speed
of plain decoding on an A100.
"""

from configs.vicuna7b_hydra import get_config as hydra_config
from medusa_jax.config import Config
from medusa_jax.heads.hydrapp import HydraPPConfig


def get_config() -> Config:
    """The recipe; model, data and precision are those of vicuna7b_hydra.py."""
    cfg = hydra_config()
    cfg.heads = HydraPPConfig(n_heads=4, n_layers=4, dropout=0.2, lm_head="own")
    cfg.optim.lr, cfg.optim.warmup_steps, cfg.optim.final_lr_ratio = 5e-4, 100, 0.33
    cfg.optim.weight_decay = 0.1
    cfg.train.batch_size, cfg.train.accumulation, cfg.train.epochs = 32, 4, 10
    cfg.train.label_weight, cfg.train.teacher_weight = 0.0, 1.0
    return cfg
