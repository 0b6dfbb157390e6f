"""Medusa heads for the demo: 4 heads of two residual blocks that share the backbone's LM head.

    python -m medusa_jax distill --model work/demo/native/export \\
        --prompts work/demo/answer_seeds.jsonl --out work/demo/answers --temperature 0
    python train.py --config=configs/demo_medusa.py --workdir=work/demo/medusa

They are trained on the backbone's continuations (counted.npy marks the tokens it wrote);
`--config.data.source=work/demo/train` trains them on the corpus.
"""

from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)


def get_config() -> Config:
    """Medusa-1 (frozen backbone) on the demo corpus."""
    return Config(
        model=ModelConfig(path="work/demo/native/export"),
        heads=HeadsConfig(drafter="medusa", n_heads=4, n_layers=2, lm_head="shared"),
        data=DataConfig(
            source="work/demo/answers",
            eval_source="work/demo/heldout",
            eval_samples=128,
            format="tokens",
            # Two samples (a prompt and its 200 tokens) per row.
            seq_len=640,
            packing="first_fit",
            # The backbone is frozen: its hidden states are computed once (about 1 GB).
            cache_features="float32",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=40, schedule="cosine", clip_norm=1.0),
        train=TrainConfig(
            stage="medusa1",
            batch_size=4,
            steps=1200,
            dtype="bfloat16",
            remat=False,
            # Two answers of at most 200 tokens per row: their 400 columns are five chunks.
            loss_chunk=80,
            log_every=20,
            eval_every=150,
            save_every=150,
        ),
        mesh=(1, 1, 1),
    )
