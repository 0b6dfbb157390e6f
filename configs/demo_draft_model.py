"""A draft model for the demo: one layer, half as wide, with the same tokenizer (0.7 M parameters).

    python -m research demo_corpus --out work/demo
    python train.py --config=configs/demo_draft_model.py --workdir=work/demo/draft_model
    python decode.py --drafter draft_model:work/demo/draft_model/export --prompt "import os" --compare

It is trained on the corpus. `--config.data.source=work/demo/answers` (see demo_medusa.py) trains it on
the backbone's text instead, which is the text it has to predict.
"""

from configs.demo_backbone import get_config as backbone_config
from medusa_jax.config import Config


def get_config() -> Config:
    """Language modelling from scratch, like the backbone's first stage."""
    cfg = backbone_config()
    arch = cfg.model.arch
    arch.d_model, arch.n_layers, arch.head_dim, arch.d_ff = 128, 1, 32, 352
    cfg.optim.schedule, cfg.optim.warmup_steps = "cosine", 60
    # Many small steps: 1.2 M tokens, a few minutes on one core.
    cfg.train.batch_size, cfg.train.steps = 2, 1200
    cfg.data.eval_samples = 32
    return cfg
