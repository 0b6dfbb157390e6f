"""Medusa-2 for Vicuna-13B, second of two stages: heads and backbone together (QLoRA).

    python train.py --config=configs/vicuna13b_m1.py --workdir=runs/vicuna13b_m1 \\
        --config.model.quantise=nf4
    python train.py --config=configs/vicuna13b_m2.py --workdir=runs/vicuna13b_m2
    python train.py --config=configs/vicuna13b_m2.py --config.dry_run      (shapes and memory only)

The paper's figures (Medusa 2.2.2, B.2, B.3): starts from the heads of stage one; LoRA of rank 32,
alpha 16, dropout 0.05 on every linear layer, LM head included, over a 4-bit (NF4) backbone; 8-bit
AdamW; learning rate 5e-4 for the adapter and four times that for the heads; lambda_0 = 0.2;
batch 64, two epochs of ShareGPT, cosine with 40 warm-up steps.

What to expect from the paper: a 2.83x speed-up on MT-bench (3.51 tokens per step, each
step 1.23 times as long as a plain one), quality 6.43 (0.14 below the original model);
AlpacaEval: 3.28 tokens per step, 3.16x.
"""

from configs.vicuna7b_m2 import get_config as vicuna7b_config
from configs.vicuna13b_m1 import get_config as first_stage_config
from medusa_jax.config import Config


def get_config() -> Config:
    """The recipe of vicuna7b_m2.py on the model of vicuna13b_m1.py."""
    cfg, stage1 = vicuna7b_config(), first_stage_config()
    cfg.model.path, cfg.model.arch = stage1.model.path, stage1.model.arch
    cfg.train.heads_path = "runs/vicuna13b_m1/export"
    cfg.train.accumulation = 16
    return cfg
