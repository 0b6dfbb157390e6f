"""The demo's training against loops; `medusa_jax/demo/refine.py` calls it and makes its rows.

python -m medusa_jax.demo.refine --model work/demo/native/export --work work/demo
"""

from configs.demo_backbone import get_config as backbone_config
from medusa_jax.config import Config


def get_config() -> Config:
    """The backbone alone: corpus rows as likely, its own repeats as unlikely as can be."""
    cfg = backbone_config()
    cfg.model.tokenizer = ""  # the one beside the model
    cfg.data.seq_len = 328  # a prompt of up to 128 tokens and 200 new ones
    cfg.data.eval_samples = 96
    cfg.optim.lr = 1e-3
    cfg.optim.weight_decay = 0.0
    cfg.optim.warmup_steps = 20
    cfg.optim.schedule = "wsd"
    cfg.train.unlikelihood = 1.0
    cfg.train.batch_size = 12
    cfg.train.steps = 1200
    cfg.train.log_every = 8
    cfg.train.eval_every = 80
    cfg.train.save_every = 40
    return cfg
