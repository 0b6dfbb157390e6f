"""The demo's backbone, first stage: a 4.7M-parameter Llama that writes Python, from scratch.

python -m research demo_corpus --out work/demo
python train.py --config=configs/demo_backbone.py --workdir=work/demo/backbone
"""

from medusa_jax.config import (
    Config,
    DataConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)


def get_config() -> Config:
    """Full-parameter language modelling on the demo corpus."""
    return Config(
        model=ModelConfig(
            tokenizer="work/demo/tokenizer",
            arch=LlamaConfig(
                vocab_size=4096,
                d_model=256,
                n_layers=5,
                n_heads=4,
                n_kv_heads=2,
                head_dim=64,
                d_ff=704,
                max_position=1024,
                rope_theta=10000.0,
                tie_embeddings=True,
            ),
        ),
        data=DataConfig(
            source="work/demo/train",
            eval_source="work/demo/heldout",
            eval_samples=128,
            format="tokens",
            seq_len=512,
            packing="concat",
        ),
        optim=OptimConfig(
            name="muon",
            lr=6e-3,
            warmup_steps=200,
            schedule="constant",
            b2=0.98,
            weight_decay=0.05,
            clip_norm=1.0,
        ),
        train=TrainConfig(
            stage="backbone",
            batch_size=8,
            steps=1900,
            dtype="float32",
            remat=False,
            loss_chunk=128,
            log_every=20,
            eval_every=500,
            save_every=500,
        ),
        mesh=(1, 1, 1),
    )
