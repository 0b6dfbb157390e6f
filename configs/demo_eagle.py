"""EAGLE-1 for the demo: one decoder layer after the backbone, trees up to four deep.

    python train.py --config=configs/demo_eagle.py --workdir=work/demo/eagle

With the backbone and the text of demo_medusa.py. 0.87 M parameters, 1.7 MB in
bfloat16.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """Heads on the frozen demo backbone, with the loss weights of vicuna7b_eagle.py."""
    fields = {
        "heads.n_layers": 1,
        "heads.fc_bias": True,
        "optim.lr": 2e-3,
        "train.lambda_decay": 1.0,
        "train.label_weight": 0.0,
        "train.teacher_weight": 0.1,
        "train.steps": 1200,
        # U(-0.1, 0.1) on rows of 640 hidden states 256 wide.
        "train.hidden_noise": 0.1 * (640 * 256) ** 0.5,
    }
    return in_family(medusa_config(), "eagle", fields)
