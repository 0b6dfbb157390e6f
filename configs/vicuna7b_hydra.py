"""Hydra heads for Vicuna-7B, the recipe of the head-to-head with Medusa (Hydra, section 5).

    python train.py --config=configs/vicuna7b_hydra.py --workdir=runs/vicuna7b_hydra
    python train.py --config=configs/vicuna7b_hydra.py --config.dry_run   (shapes and memory only)

Four heads of one hidden layer, one epoch of ShareGPT, batch 128 (of packed rows here, of conversations
in the paper, so an epoch has fewer updates here), learning rate 1e-3, cosine, the text's next tokens as
targets, equal weights for all heads; the paper does not give the warm-up. 0.99 B parameters.

What to expect: on MT-bench, greedy, the paper reports 3.04 tokens per step against 2.58 for Medusa
heads with the same recipe (2.36x and 2.13x the speed of plain decoding on an A100).
"""

from medusa_jax.config import (
    Config,
    DataConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from medusa_jax.heads.hydra import HydraConfig


def get_config() -> Config:
    """The recipe; `model.arch` is only for the dry run, training reads the model's."""
    return Config(
        model=ModelConfig(
            path="lmsys/vicuna-7b-v1.3",
            param_dtype="bfloat16",
            arch=LlamaConfig(max_position=2048, rms_eps=1e-6),
        ),
        heads=HydraConfig(n_heads=4, n_layers=1, lm_head="own"),
        data=DataConfig(
            source="Aeala/ShareGPT_Vicuna_unfiltered",
            split="train",
            format="sharegpt",
            seq_len=2048,
            packing="first_fit",
            chat_template="vicuna",
        ),
        optim=OptimConfig(name="adamw", lr=1e-3, warmup_steps=40, schedule="cosine"),
        train=TrainConfig(
            stage="medusa1",
            batch_size=128,
            accumulation=16,
            epochs=1,
            dtype="bfloat16",
            remat=False,
            loss_chunk=256,
            lambda_decay=1.0,
            log_every=5,
            save_every=200,
        ),
        mesh=(1, -1, 1),
    )
