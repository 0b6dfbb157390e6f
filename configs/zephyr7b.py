"""Medusa-2 for Zephyr-7B by self-distillation: a model aligned with feedback; self-talk as data.

    medusa distill --model HuggingFaceH4/zephyr-7b-beta --mode self_talk \\
        --prompts HuggingFaceH4/ultrachat_200k --split train_sft --limit 100000 \\
        --chat_template zephyr --max_new_tokens 1024 --out runs/zephyr7b_answers
    python train.py --config=configs/zephyr7b.py --workdir=runs/zephyr7b
    python train.py --config=configs/zephyr7b.py --config.dry_run          (shapes and memory only)

The paper's figures (Medusa 2.3.2, 3.2, B.2, B.4): about 100,000 conversations, sequences of 2048
tokens, batch 128; the backbone's loss is the KL divergence from the original model, which is the
same parameters with the adapter off; LoRA of rank 32, alpha 16, dropout 0.05 on every linear
layer, no quantisation (the teacher would be the quantised model); 8-bit AdamW; learning rate
1e-4 for the adapter, four times that for the heads, 20 warm-up steps; lambda_0 rises to 0.01 as
a sine instead of two stages. Two epochs are the reference implementation's.

What to expect from the paper: a 2.66x speed-up on MT-bench (3.14 tokens per step, each step 1.18
times as long as a plain one), quality 7.25 (0.07 below the original model); AlpacaEval: 3.08
tokens per step, 2.91x.
"""

from configs.vicuna33b import get_config as vicuna33b_config
from medusa_jax.config import Config, LlamaConfig


def get_config() -> Config:
    """The recipe of vicuna33b.py on another model; `model.arch` is only for the dry run."""
    cfg = vicuna33b_config()
    cfg.model.path = "HuggingFaceH4/zephyr-7b-beta"
    cfg.model.arch = LlamaConfig(
        n_kv_heads=8, d_ff=14336, max_position=32768, sliding_window=4096
    )
    cfg.data.source = "runs/zephyr7b_answers/messages.jsonl"
    cfg.data.chat_template = "zephyr"
    cfg.train.accumulation = 16
    return cfg
