"""Medusa-1 heads for Llama-3.1-8B-Instruct that share the backbone's LM head.

    python -m medusa_jax distill --model meta-llama/Llama-3.1-8B-Instruct --chat_template llama3 \\
        --prompts HuggingFaceH4/ultrachat_200k --split train_sft --limit 100000 \\
        --max_new_tokens 1024 --out runs/llama31_8b_answers
    python train.py --config=configs/llama31_8b.py --workdir=runs/llama31_8b
    python train.py --config=configs/llama31_8b.py --config.heads.lm_head=low_rank \\
        --config.heads.rank=256 --workdir=runs/llama31_8b_low_rank
    python train.py --config=configs/llama31_8b.py --config.dry_run        (shapes and memory only)

With a vocabulary of 128,256, five separate LM heads have 2.6 billion parameters: together with the
blocks, a third of the backbone, read in every decoding step. With a shared LM head the heads are five
blocks of two layers (0.17 billion) and one product with the backbone's LM head; low-rank LM heads (256)
add 0.17 billion more.

What to expect: the paper has no figure for this model. Compare `top1` and `accepted_length_tree` in
log.jsonl between shared, low-rank and separate LM heads (`--config.heads.lm_head=own`).
"""

from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)


def get_config() -> Config:
    """The recipe; `model.arch` is only for the dry run, training reads the model's."""
    return Config(
        model=ModelConfig(
            path="meta-llama/Llama-3.1-8B-Instruct",
            param_dtype="bfloat16",
            arch=LlamaConfig(
                vocab_size=128256,
                d_model=4096,
                n_layers=32,
                n_heads=32,
                n_kv_heads=8,
                head_dim=128,
                d_ff=14336,
                max_position=131072,
                rope_theta=500000.0,
                rope_scaling="llama3",
                rope_factor=8.0,
            ),
        ),
        heads=HeadsConfig(drafter="medusa", n_heads=5, n_layers=2, lm_head="shared"),
        data=DataConfig(
            source="runs/llama31_8b_answers/messages.jsonl",
            format="messages",
            seq_len=2048,
            packing="first_fit",
            chat_template="llama3",
        ),
        optim=OptimConfig(name="adamw", lr=2e-3, warmup_steps=40, schedule="cosine"),
        train=TrainConfig(
            stage="medusa1",
            batch_size=64,
            accumulation=16,
            epochs=2,
            dtype="bfloat16",
            remat=False,
            loss_chunk=128,
            lambda_decay=0.8,
            log_every=5,
            save_every=200,
        ),
        mesh=(1, -1, 1),
    )
