"""The demo's backbone, second stage: trained together with draft heads, so that it looks further ahead.

    python train.py --config=configs/demo_backbone.py --workdir=work/demo/backbone
    python train.py --config=configs/demo_native.py --workdir=work/demo/native

The paper's "native heads" (Medusa 2.2.2): one run trains the language model and three heads. Three new
layers are added after the existing five: a model larger than the CPU's cache is bound by memory
bandwidth, like large models, and then a tree costs least.

The result is the backbone: its last hidden state has to predict the tokens after the next one. The
bundled heads are trained afterwards, on the frozen backbone (configs/demo_medusa.py).
"""

from configs.demo_backbone import get_config as backbone_config
from medusa_jax.config import Config, HeadsConfig


def get_config() -> Config:
    """Backbone and heads together on the demo corpus."""
    cfg = backbone_config()
    cfg.model.path = "work/demo/backbone/export"
    cfg.model.tokenizer = ""  # the model's
    cfg.model.add_layers = 3
    cfg.heads = HeadsConfig(
        drafter="medusa", n_heads=3, n_layers=1, lm_head="low_rank", rank=64
    )
    cfg.optim.warmup_steps = 50
    cfg.optim.schedule = "wsd"
    cfg.optim.heads_name = "adamw"
    cfg.optim.heads_lr_multiplier = 0.33
    cfg.train.stage = "native"
    cfg.train.lambda_0 = 0.5
    cfg.train.steps = 520
    return cfg
