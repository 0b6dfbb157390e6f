"""The demo's training against loops; `medusa_jax/demo/refine.py` calls it and makes its rows.

    python -m medusa_jax.demo.refine --model work/demo/native/export --work work/demo

Or, on rows that were marked elsewhere (a token directory with -1 in its counted.npy),

    python train.py --config=configs/demo_refine.py --workdir=work/demo/refined \\
        --config.model.path=work/demo/native/export --config.data.source=path/to/rows

Heads train beside the backbone, as in demo_native.py, so that it goes on looking ahead while its
text changes. The heads that ship are fitted afterwards, on the frozen result.
"""

from configs.demo_native import get_config as native_config
from medusa_jax.config import Config


def get_config() -> Config:
    """The corpus as likely, repeats in the model's own text as unlikely as can be."""
    cfg = native_config()
    cfg.model.add_layers = 0
    cfg.data.seq_len = 328  # a prompt of up to 128 tokens and 200 new ones
    cfg.data.eval_samples = 96
    cfg.optim.lr = 1.5e-3
    cfg.optim.heads_lr_multiplier = 1.33
    cfg.optim.weight_decay = 0.0
    cfg.optim.warmup_steps = 20
    cfg.train.unlikelihood = 4.0
    cfg.train.batch_size = 12
    cfg.train.steps = 600
    cfg.train.log_every = 8
    cfg.train.eval_every = 40
    cfg.train.save_every = 40
    return cfg
