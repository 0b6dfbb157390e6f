"""Medusa-1 heads for Vicuna-13B: five heads on a frozen backbone (Medusa 2.2.1 and 3.1).

    python train.py --config=configs/vicuna13b_m1.py --workdir=runs/vicuna13b_m1
    python train.py --config=configs/vicuna13b_m1.py --config.dry_run      (shapes and memory only)

Like vicuna7b_m1.py: two epochs of ShareGPT, batch 64, learning rate 2e-3, cosine with 40 warm-up
steps. The paper uses a 4-bit backbone and an 8-bit optimizer:
`--config.model.quantise=nf4 --config.optim.name=adamw8bit`.

What to expect: the paper reports a 2.33x speed-up of Medusa-1 on MT-bench. The published heads of
this model (v1.3) have a top-1 accuracy of .59 .34 .22 .15 .12 for the tokens 2, 3, 4, 5 and 6 ahead;
`top1` in log.jsonl is the same measure.
"""

from configs.vicuna7b_m1 import get_config as vicuna7b_config
from medusa_jax.config import Config, LlamaConfig


def get_config() -> Config:
    """The recipe of vicuna7b_m1.py on the larger model; `model.arch` is only for the dry run."""
    cfg = vicuna7b_config()
    cfg.model.path = "lmsys/vicuna-13b-v1.5"
    cfg.model.arch = LlamaConfig(
        d_model=5120, n_layers=40, n_heads=40, n_kv_heads=40, d_ff=13824
    )
    cfg.train.accumulation = 16
    return cfg
