"""EAGLE-1 for Vicuna-7B (Li et al. 2024): one decoder layer that continues the hidden states.

    python train.py --config=configs/vicuna7b_eagle.py --workdir=runs/vicuna7b_eagle
    python train.py --config=configs/vicuna7b_eagle.py --config.dry_run   (shapes and memory only)

The loss is smooth L1 to the backbone's next hidden state and 0.1 times cross-entropy with its
distribution there, on hidden states with noise of U(-0.1, 0.1). Learning rate 3e-5 after 2000
warm-up steps, AdamW (0.9, 0.95) and 20 epochs are those of the authors' code, which clips each
gradient at 0.5; here their norm is clipped. Batch 32 is ours. 0.24 B parameters for any depth of trees
(`--config.heads.n_heads`). The loss is over the first level, as released; `--config.train.levels=3`
also trains the second and third, each on the outputs of the level before.

What to expect: on MT-bench, greedy, Amphista's table 9 reports 3.84 tokens per step and 2.58x the speed
of plain decoding on an A100.
"""

from configs.vicuna7b_hydra import get_config as hydra_config
from medusa_jax.config import Config
from medusa_jax.heads.eagle import EagleConfig


def get_config() -> Config:
    """The recipe; model, data and precision are those of vicuna7b_hydra.py."""
    cfg = hydra_config()
    cfg.heads = EagleConfig(n_heads=5, n_layers=1)
    cfg.optim.lr, cfg.optim.warmup_steps, cfg.optim.b2 = 3e-5, 2000, 0.95
    cfg.optim.clip_norm = 0.5
    cfg.train.batch_size, cfg.train.accumulation, cfg.train.epochs = 32, 4, 20
    cfg.train.feature_weight = 1.0
    cfg.train.label_weight, cfg.train.teacher_weight = 0.0, 0.1
    # In the units of `hidden_noise`: over sqrt(L d).
    cfg.train.hidden_noise = 0.1 * (cfg.data.seq_len * cfg.model.arch.d_model) ** 0.5
    return cfg
