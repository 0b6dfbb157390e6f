"""Medusa-2 for Vicuna-13B, second of two stages: heads and backbone together (QLoRA).

    python train.py --config=configs/vicuna13b_m1.py --workdir=runs/vicuna13b_m1 \\
        --config.model.quantise=nf4
    python train.py --config=configs/vicuna13b_m2.py --workdir=runs/vicuna13b_m2
    python train.py --config=configs/vicuna13b_m2.py --config.dry_run      (shapes and memory only)

The paper's figures (Medusa 2.2.2, B.2, B.3): starts from the heads of stage one; LoRA of rank 32,
alpha 16, dropout 0.05 on every linear layer, LM head included, over a 4-bit (NF4) backbone; 8-bit
AdamW; learning rate 5e-4 for the adapter and four times that for the heads; lambda_0 = 0.2;
batch 64, two epochs of ShareGPT, cosine with 40 warm-up steps.

What to expect from the paper: a 2.83x speed-up on MT-bench (3.51 tokens per step, each
step 1.23 times as long as a plain one), quality 6.43 (0.14 below the original model);
AlpacaEval: 3.28 tokens per step, 3.16x.
"""

from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    LlamaConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)


def get_config() -> Config:
    """The recipe; `model.arch` only serves the dry run, training reads the model's own."""
    return Config(
        model=ModelConfig(
            path="lmsys/vicuna-13b-v1.5",
            param_dtype="bfloat16",
            quantise="nf4",
            arch=LlamaConfig(
                vocab_size=32000,
                d_model=5120,
                n_layers=40,
                n_heads=40,
                n_kv_heads=40,
                head_dim=128,
                d_ff=13824,
                max_position=4096,
            ),
        ),
        heads=HeadsConfig(drafter="medusa", n_heads=5, n_layers=1, lm_head="own"),
        data=DataConfig(
            source="Aeala/ShareGPT_Vicuna_unfiltered",
            split="train",
            format="sharegpt",
            seq_len=2048,
            packing="first_fit",
            chat_template="vicuna",
        ),
        optim=OptimConfig(
            name="adamw8bit",
            lr=5e-4,
            heads_lr_multiplier=4.0,
            warmup_steps=40,
            schedule="cosine",
        ),
        lora=LoraConfig(rank=32, alpha=16.0, dropout=0.05),
        train=TrainConfig(
            stage="medusa2",
            heads_path="runs/vicuna13b_m1/export",
            lambda_0=0.2,
            lambda_decay=0.8,
            batch_size=64,
            accumulation=16,
            epochs=2,
            dtype="bfloat16",
            remat=True,
            loss_chunk=256,
            log_every=5,
            save_every=200,
        ),
        mesh=(1, -1, 1),
    )
