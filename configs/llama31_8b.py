"""Medusa-1 heads for Llama-3.1-8B-Instruct that share the backbone's LM head.

    medusa distill --model meta-llama/Llama-3.1-8B-Instruct --chat_template llama3 \\
        --prompts HuggingFaceH4/ultrachat_200k --split train_sft --limit 100000 \\
        --max_new_tokens 1024 --out runs/llama31_8b_answers
    python train.py --config=configs/llama31_8b.py --workdir=runs/llama31_8b
    python train.py --config=configs/llama31_8b.py --config.heads.lm_head=low_rank \\
        --config.heads.rank=256 --workdir=runs/llama31_8b_low_rank
    python train.py --config=configs/llama31_8b.py --config.dry_run        (shapes and memory only)

With a vocabulary of 128,256, five separate LM heads have 2.6 billion parameters: together with the
blocks, a third of the backbone, read in every decoding step. With a shared LM head the heads are five
blocks of two layers (0.17 billion) and one product with the backbone's LM head; low-rank LM heads (256)
add 0.17 billion more.

What to expect: the paper has no figure for this model. Compare `top1` and `accepted_length_tree` in
log.jsonl between shared, low-rank and separate LM heads (`--config.heads.lm_head=own`).
"""

from configs.vicuna7b_m1 import get_config as vicuna7b_config
from medusa_jax.config import Config, LlamaConfig


def get_config() -> Config:
    """The recipe of vicuna7b_m1.py on another model; `model.arch` is only for the dry run."""
    cfg = vicuna7b_config()
    cfg.model.path = "meta-llama/Llama-3.1-8B-Instruct"
    cfg.model.arch = LlamaConfig(
        vocab_size=128256,
        n_kv_heads=8,
        d_ff=14336,
        max_position=131072,
        rope_theta=500000.0,
        rope_scaling="llama3",
        rope_factor=8.0,
    )
    cfg.heads.n_layers, cfg.heads.lm_head = 2, "shared"
    cfg.data.source = "runs/llama31_8b_answers/messages.jsonl"
    cfg.data.format, cfg.data.chat_template = "messages", "llama3"
    cfg.train.accumulation = 16
    cfg.train.loss_chunk = 128
    return cfg
