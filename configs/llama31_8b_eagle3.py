"""EAGLE-3 for Llama-3.1-8B-Instruct (Li et al. 2025): a decoder layer that reads inside the backbone.

    python train.py --config=configs/llama31_8b_eagle3.py --workdir=runs/llama31_8b_eagle3
    python train.py --config=configs/llama31_8b_eagle3.py --config.data.cache_features=float8 \\
        --workdir=runs/llama31_8b_eagle3
    python train.py --config=configs/llama31_8b_eagle3.py --config.dry_run   (shapes and memory only)

On answers that the model has written (configs/llama31_8b.py says how). The loss is cross-entropy with
the backbone's distribution over seven levels, weighted by 0.8^k; 32,000 tokens, AdamW (0.9, 0.95) and
seven levels are those of the authors' code, which clips each gradient at 0.5; here their norm is
clipped. Learning rate 1e-4, warm-up, batch 32 and 10 epochs are ours. 0.42 B parameters. EAGLE-3.1 is
`--config.heads.fc_norm --config.heads.norm_output`. Hidden states on disk take 34 MB per row of 2048
tokens in 8 bits, with the three streams that the heads read.

What to expect: on MT-bench, greedy, the paper reports 6.13 tokens per step and 4.4x the speed of plain
decoding with dynamic trees. Chains of four drafts of the released heads give 3.08 in vLLM.
"""

from configs.llama31_8b import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.eagle3 import Eagle3Config


def get_config() -> Config:
    """The recipe; model, text and precision are those of llama31_8b.py."""
    cfg = medusa_config()
    cfg.heads = Eagle3Config(n_heads=7, draft_vocab=32000)
    cfg.optim.lr, cfg.optim.warmup_steps, cfg.optim.b2 = 1e-4, 1000, 0.95
    cfg.optim.clip_norm = 0.5
    cfg.train.batch_size, cfg.train.accumulation, cfg.train.epochs = 32, 8, 10
    cfg.train.label_weight, cfg.train.teacher_weight = 0.0, 1.0
    cfg.train.levels, cfg.train.lambda_decay = 7, 0.8
    return cfg
