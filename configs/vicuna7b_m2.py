"""Medusa-2 for Vicuna-7B, second of two stages: heads and backbone together (QLoRA).

    python train.py --config=configs/vicuna7b_m1.py --workdir=runs/vicuna7b_m1 \\
        --config.model.quantise=nf4
    python train.py --config=configs/vicuna7b_m2.py --workdir=runs/vicuna7b_m2
    python train.py --config=configs/vicuna7b_m2.py --config.dry_run      (shapes and memory only)

The paper's figures (Medusa 2.2.2, B.2, B.3): starts from the heads of stage one; LoRA of rank 32,
alpha 16, dropout 0.05 on every linear layer, LM head included, over a 4-bit (NF4) backbone; 8-bit
AdamW; learning rate 5e-4 for the adapter and four times that for the heads; lambda_0 = 0.2;
batch 64, two epochs of ShareGPT, cosine with 40 warm-up steps.

What to expect from the paper: a 2.83x speed-up on MT-bench (3.47 tokens per step, each
step 1.22 times as long as a plain one) at unchanged quality (6.18 against 6.17 of the original
model); AlpacaEval: 3.23 tokens per step, 2.88x. Fine-tuning both directly, without two stages,
reduces quality to 5.93 (table 2).
"""

from configs.vicuna7b_m1 import get_config as first_stage_config
from medusa_jax.config import Config, LoraConfig, OptimConfig


def get_config() -> Config:
    """The recipe; model, heads and data are those of stage one."""
    cfg = first_stage_config()
    cfg.model.quantise = "nf4"
    cfg.lora = LoraConfig(rank=32, alpha=16.0, dropout=0.05)
    cfg.optim = OptimConfig(
        name="adamw8bit",
        lr=5e-4,
        heads_lr_multiplier=4.0,
        warmup_steps=40,
        schedule="cosine",
    )
    cfg.train.stage = "medusa2"
    cfg.train.heads_path = "runs/vicuna7b_m1/export"
    cfg.train.lambda_0 = 0.2
    cfg.train.remat = True
    cfg.train.accumulation = 16  # eight v5e chips: 11.3 GB each by their compiler
    return cfg
