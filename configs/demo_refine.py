"""One round of the demo's training against loops; see medusa_jax/demo/refine.py, which calls it.

    python -m medusa_jax.demo.refine --model work/demo/native/export --work work/demo

which runs, for each round,

    python train.py --config=configs/demo_refine.py --workdir=work/demo/refined/round_1/train \\
        --config.model.path=work/demo/native/export --config.data.source=...
"""

from configs.demo_native import get_config as native_config
from medusa_jax.config import Config


def get_config() -> Config:
    """Backbone and heads together, with unlikelihood of the marked tokens."""
    cfg = native_config()
    cfg.model.add_layers = 0
    cfg.data.packing = "first_fit"
    cfg.data.seq_len = 512
    cfg.data.eval_samples = 64
    cfg.optim.lr = 2e-3
    cfg.optim.warmup_steps = 5
    cfg.optim.schedule = "cosine"
    cfg.train.unlikelihood = 1.0
    cfg.train.steps = 80
    cfg.train.save_every = 80
    cfg.train.eval_every = 80
    return cfg
