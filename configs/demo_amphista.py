"""Amphista heads for the demo: 4 heads, two adaptation layers, one auto-embedding block.

    python train.py --config=configs/demo_amphista.py --workdir=work/demo/amphista

On the backbone's own text (`work/demo/answers`, see demo_medusa.py). LM head shared with the
backbone: 2.2 M parameters, 4.3 MB in bfloat16.
"""

from medusa_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from medusa_jax.heads.amphista import AmphistaConfig


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    return Config(
        model=ModelConfig(path="work/demo/refined"),
        heads=AmphistaConfig(n_heads=4, lm_head="shared", stage_d_ff=640),
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
