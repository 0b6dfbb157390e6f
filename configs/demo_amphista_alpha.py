"""Amphista-alpha heads for the demo: as demo_amphista.py, with two auto-embedding blocks.

    python train.py --config=configs/demo_amphista_alpha.py --workdir=work/demo/amphista_alpha

On the backbone's own text (`work/demo/answers`, see demo_medusa.py). LM head shared with the
backbone: 2.4 M parameters, 4.9 MB in bfloat16.
"""

from medusa_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from medusa_jax.heads.amphista import AmphistaAlphaConfig


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    return Config(
        model=ModelConfig(path="work/demo/refined"),
        heads=AmphistaAlphaConfig(n_heads=4, lm_head="shared", stage_d_ff=640),
        data=DataConfig(
            source="work/demo/answers",
            eval_source="work/demo/heldout",
            eval_samples=128,
            format="tokens",
            seq_len=640,
            packing="first_fit",
        ),
        optim=OptimConfig(lr=2e-3, warmup_steps=40, schedule="cosine", clip_norm=1.0),
        train=TrainConfig(
            stage="medusa1",
            batch_size=4,
            steps=640,
            dtype="float32",
            remat=False,
            loss_chunk=128,
            lambda_decay=1.0,
            label_weight=0.1,
            teacher_weight=1.0,
            log_every=20,
            eval_every=100,
            save_every=100,
        ),
        mesh=(1, 1, 1),
    )
