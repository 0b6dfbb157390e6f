"""Hydra++ heads for the demo: 4 heads of 4 hidden layers behind a prefix layer.

    python train.py --config=configs/demo_hydrapp.py --workdir=work/demo/hydrapp

On the backbone's own text (`work/demo/answers`, see demo_medusa.py), with the backbone's own
distribution as the target. LM head shared with the backbone, a skip connection without
weights: 2.4 M parameters, 4.9 MB in bfloat16.
"""

from medusa_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from medusa_jax.heads.hydrapp import HydraPPConfig


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    return Config(
        model=ModelConfig(path="work/demo/refined"),
        heads=HydraPPConfig(
            n_heads=4, n_layers=4, dropout=0.1, lm_head="shared", skip="fixed"
        ),
        data=DataConfig(
            source="work/demo/answers",
            eval_source="work/demo/heldout",
            eval_samples=128,
            format="tokens",
            seq_len=640,
            packing="first_fit",
        ),
        optim=OptimConfig(
            lr=2e-3, warmup_steps=40, schedule="cosine", clip_norm=1.0, weight_decay=0.1
        ),
        train=TrainConfig(
            stage="medusa1",
            batch_size=4,
            steps=640,
            dtype="float32",
            remat=False,
            loss_chunk=128,
            lambda_decay=1.0,
            label_weight=0.0,
            teacher_weight=1.0,
            log_every=20,
            eval_every=100,
            save_every=100,
        ),
        mesh=(1, 1, 1),
    )
