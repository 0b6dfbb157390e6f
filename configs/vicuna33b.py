"""Medusa-2 for Vicuna-33B by self-distillation: its training data is private, so it writes new data.

    medusa distill --model lmsys/vicuna-33b-v1.3 --chat_template vicuna \\
        --prompts Aeala/ShareGPT_Vicuna_unfiltered --limit 100000 --temperature 0.3 \\
        --max_new_tokens 1024 --batch_size 16 --out runs/vicuna33b_answers
    python train.py --config=configs/vicuna33b.py --workdir=runs/vicuna33b
    python train.py --config=configs/vicuna33b.py --config.dry_run         (shapes and memory only)

The paper's figures (Medusa 2.3.2, 3.2, B.2, B.4): about 100,000 conversations, sequences of 2048
tokens, batch 128; the backbone's loss is the KL divergence from the original model, which is the
same parameters with the adapter off; LoRA of rank 32, alpha 16, dropout 0.05 on every linear
layer, no quantisation (the teacher would be the quantised model); 8-bit AdamW; learning rate
1e-4 for the adapter, four times that for the heads, 20 warm-up steps; lambda_0 rises to 0.01 as
a sine instead of two stages. Two epochs are the reference implementation's.

What to expect from the paper: a 2.35x speed-up on MT-bench (3.01 tokens per step, each step 1.27
times as long as a plain one), quality 7.18 (0.05 above the original model); AlpacaEval: 2.85
tokens per step, 2.26x.
"""

from configs.vicuna7b_m1 import get_config as vicuna7b_config
from medusa_jax.config import Config, LlamaConfig, LoraConfig, OptimConfig


def get_config() -> Config:
    """The recipe; `model.arch` is only for the dry run, training reads the model's."""
    cfg = vicuna7b_config()
    cfg.model.path = "lmsys/vicuna-33b-v1.3"
    cfg.model.arch = LlamaConfig(
        d_model=6656,
        n_layers=60,
        n_heads=52,
        n_kv_heads=52,
        d_ff=17920,
        max_position=2048,
        rms_eps=1e-6,
    )
    cfg.data.source = "runs/vicuna33b_answers/messages.jsonl"
    cfg.data.format = "messages"
    cfg.optim = OptimConfig(
        name="adamw8bit",
        lr=1e-4,
        heads_lr_multiplier=4.0,
        warmup_steps=20,
        schedule="cosine",
    )
    cfg.lora = LoraConfig(rank=32, alpha=16.0, dropout=0.05)
    cfg.train.stage = "medusa2"
    cfg.train.backbone_loss = "kl"
    cfg.train.lambda_0, cfg.train.lambda_0_schedule = 0.01, "sine"
    cfg.train.batch_size, cfg.train.accumulation = 128, 32
    cfg.train.remat = True
    return cfg
