"""Amphista-alpha heads for Vicuna-7B: two auto-embedding blocks (Li et al. 2025, A.2.4).

    python train.py --config=configs/vicuna7b_amphista_alpha.py --workdir=runs/vicuna7b_alpha
    python train.py --config=configs/vicuna7b_amphista_alpha.py --config.dry_run   (shapes only)

All else as in vicuna7b_amphista.py. What to expect: on MT-bench, greedy, the paper reports 3.58
tokens per step and 2.63x the speed of plain decoding on an A100 (Amphista 3.50 and 2.44x).
"""

from medusa_jax.config import (
    Config,
    DataConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from medusa_jax.heads.amphista import AmphistaAlphaConfig


def get_config() -> Config:
    """The recipe; `model.arch` only serves the dry run, training reads the model's own."""
    return Config(
        model=ModelConfig(
            path="lmsys/vicuna-7b-v1.3",
            param_dtype="bfloat16",
            arch=LlamaConfig(max_position=2048, rms_eps=1e-6),
        ),
        heads=AmphistaAlphaConfig(n_heads=4, lm_head="own"),
        data=DataConfig(
            source="Aeala/ShareGPT_Vicuna_unfiltered",
            split="train",
            format="sharegpt",
            seq_len=2048,
            packing="first_fit",
            chat_template="vicuna",
        ),
        optim=OptimConfig(name="adamw", lr=1e-3, warmup_steps=100, schedule="cosine"),
        train=TrainConfig(
            stage="medusa1",
            batch_size=64,
            accumulation=8,
            epochs=4,
            dtype="bfloat16",
            remat=False,
            loss_chunk=256,
            lambda_decay=1.0,
            label_weight=0.1,
            teacher_weight=1.0,
            log_every=5,
            save_every=200,
        ),
        mesh=(1, -1, 1),
    )
