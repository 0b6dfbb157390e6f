"""Medusa heads on the demo backbone, with the backbone's own LM head (5 heads of 2 residual blocks).

    python train.py --config=configs/demo_medusa.py --workdir=work/demo/medusa

`--config.data.source=DIR` trains on other token arrays, such as the backbone's own
continuations (counted.npy then marks which tokens it wrote itself).
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
        model=ModelConfig(path="work/demo/backbone/export"),
        heads=HeadsConfig(drafter="medusa", n_heads=5, n_layers=2, lm_head="shared"),
        data=DataConfig(
            source="work/demo/train",
            eval_source="work/demo/heldout",
            eval_samples=128,
            format="tokens",
            seq_len=512,
            packing="concat",
        ),
        optim=OptimConfig(lr=2e-3, warmup_steps=40, schedule="cosine", clip_norm=1.0),
        train=TrainConfig(
            stage="medusa1",
            batch_size=16,
            steps=2000,
            dtype="float32",
            remat=False,
            loss_chunk=128,
            log_every=20,
            eval_every=250,
            save_every=250,
        ),
        mesh=(1, 1, 1),
    )
