"""EAGLE-1 for the demo: one decoder layer after the backbone, trees up to four deep.

    python train.py --config=configs/demo_eagle.py --workdir=work/demo/eagle

With the backbone and the text of demo_medusa.py. 0.87 M parameters, 1.7 MB in
bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.eagle import EagleConfig


def get_config() -> Config:
    """Heads on the frozen demo backbone, with the loss weights of vicuna7b_eagle.py."""
    cfg = medusa_config()
    cfg.heads = EagleConfig(n_heads=4, n_layers=1)
    cfg.optim.lr = 2e-3
    cfg.train.lambda_decay = 1.0
    cfg.train.feature_weight = 1.0
    cfg.train.label_weight, cfg.train.teacher_weight = 0.0, 0.1
    cfg.train.steps = 1200
    # U(-0.1, 0.1) on rows of 640 hidden states 256 wide.
    cfg.train.hidden_noise = 0.1 * (cfg.data.seq_len * 256) ** 0.5
    return cfg
