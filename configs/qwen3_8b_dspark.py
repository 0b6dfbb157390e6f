"""DSpark for Qwen3-8B, the first model in the paper's tables (arXiv 2607.05147).

    medusa distill --model Qwen/Qwen3-8B --prompts mlabonne/open-perfectblend --split train \\
        --limit 100000 --max_new_tokens 1024 --out runs/qwen3_8b_answers
    python train.py --config=configs/qwen3_8b_dspark.py --workdir=runs/qwen3_8b_dspark
    python train.py --config=configs/qwen3_8b_dspark.py --config.dry_run     (shapes and memory only)

The recipe of llama31_8b_dspark.py with the five layers of the authors' code. 1.13 B parameters.

What to expect: 3.72 tokens per step on MT-bench and 6.17 on GSM8K at T = 1, chains of seven (table 1).
"""

from configs.llama31_8b_dspark import get_config as dspark_config
from medusa_jax.config import Config, LlamaConfig


def get_config() -> Config:
    """`model.arch` is only for the dry run."""
    cfg = dspark_config()
    cfg.model.path = "Qwen/Qwen3-8B"
    cfg.model.arch = LlamaConfig(
        vocab_size=151936,
        n_layers=36,
        n_kv_heads=8,
        d_ff=12288,
        max_position=40960,
        rms_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
    )
    cfg.heads.n_layers, cfg.heads.mask_token = 5, 151669
    cfg.data.source, cfg.data.chat_template = "runs/qwen3_8b_answers/messages.jsonl", ""
    return cfg
