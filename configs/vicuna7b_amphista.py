"""Amphista heads for Vicuna-7B (Li et al. 2025, section 4.1).

    python train.py --config=configs/vicuna7b_amphista.py --workdir=runs/vicuna7b_amphista
    python train.py --config=configs/vicuna7b_amphista.py --config.dry_run   (shapes and memory only)

Four heads, two staged adaptation layers, one auto-embedding block; four epochs of ShareGPT,
learning rate 1e-3, cosine with warm-up. The paper leaves open batch size (64 here), warm-up (100
steps) and the weights of its two losses (1 for the backbone's distribution, 0.1 for the text).
1.13 B parameters; `--config.heads.lm_head=low_rank --config.heads.rank=256`, its fastest in table
11, has 0.64 B.

The ablations of tables 4, 5 and 10 are `--config.heads.` blocks=0 (w/o Auto-embedding),
position_encoding=false, stages=0 (w/o Staged-Adaptation), stages=1, 3, 4, sampled_token=false.

What to expect: on MT-bench, greedy, the paper reports 3.50 tokens per step and 2.44x the speed
of plain decoding on an A100 (Medusa 2.52 and 1.87x, Hydra++ 3.58 and 2.37x).
"""

from medusa_jax.config import (
    Config,
    DataConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from medusa_jax.heads.amphista import AmphistaConfig


def get_config() -> Config:
    """The recipe; `model.arch` only serves the dry run, training reads the model's own."""
    return Config(
        model=ModelConfig(
            path="lmsys/vicuna-7b-v1.3",
            param_dtype="bfloat16",
            arch=LlamaConfig(max_position=2048, rms_eps=1e-6),
        ),
        heads=AmphistaConfig(n_heads=4, lm_head="own"),
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
