"""Medusa-2 for SmolLM2-135M-Instruct: heads and LoRA adapters together, after smollm2_medusa.py.

    python train.py --config=configs/smollm2_medusa.py --workdir=work/smollm2/medusa
    python train.py --config=configs/smollm2_m2.py --workdir=work/smollm2/medusa2

Second of two stages (Medusa 2.2.2): starts from the heads of the first; LoRA of rank 32 on every
linear layer, learning rate of the heads four times the adapter's, lambda_0 = 0.2. The text is the
model's own, so the backbone's loss is the divergence from the original model (self-distillation,
2.3.2). The backbone changes, so hidden states are not cached, and a step takes ten times as long as one
that trains only heads.
"""

from configs.smollm2_medusa import get_config as first_stage_config
from medusa_jax.config import Config, LoraConfig, OptimConfig


def get_config() -> Config:
    """The recipe; model, heads and text are those of the first stage."""
    cfg = first_stage_config()
    cfg.data.cache_features = cfg.data.features_path = ""
    cfg.lora = LoraConfig(rank=32, alpha=16.0, dropout=0.05)
    cfg.optim = OptimConfig(
        lr=5e-4, heads_lr_multiplier=4.0, warmup_steps=20, schedule="cosine", clip_norm=1.0
    )
    cfg.train.stage = "medusa2"
    cfg.train.heads_path = "work/smollm2/medusa/export"
    cfg.train.backbone_loss = "kl"
    cfg.train.lambda_0 = 0.2
    cfg.train.batch_size = 4
    cfg.train.steps = 200
    cfg.train.eval_every = cfg.train.save_every = 50
    return cfg
