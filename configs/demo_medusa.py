"""Medusa heads for the demo: 5 heads of one residual block, low-rank LM heads.

    python -m medusa_jax.distill --model work/demo/native/export \\
        --prompts work/demo/answer_seeds.jsonl --out work/demo/answers --temperature 0
    python train.py --config=configs/demo_medusa.py --workdir=work/demo/medusa

They learn from the backbone's own continuations (counted.npy marks what it wrote itself); with
`--config.data.source=work/demo/train` they learn from the corpus.
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
        heads=HeadsConfig(
            drafter="medusa", n_heads=5, n_layers=1, lm_head="low_rank", rank=64
        ),
        data=DataConfig(
            source="work/demo/answers",
            eval_source="work/demo/heldout",
            eval_samples=128,
            format="tokens",
            # Two samples (a prompt and its 200 tokens) to a row.
            seq_len=640,
            packing="first_fit",
            # The backbone is frozen: its hidden states are computed once (about 1 GB).
            cache_features="float32",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=40, schedule="cosine", clip_norm=1.0),
        train=TrainConfig(
            stage="medusa1",
            batch_size=4,
            steps=900,
            dtype="float32",
            remat=False,
            loss_chunk=128,
            log_every=20,
            eval_every=450,
            save_every=450,
        ),
        mesh=(1, 1, 1),
    )
