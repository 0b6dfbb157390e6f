"""Amphista-alpha heads for the demo: as demo_amphista.py, with two auto-embedding blocks.

    python train.py --config=configs/demo_amphista_alpha.py --workdir=work/demo/amphista_alpha

With the backbone and the text of demo_medusa.py. LM head shared with the
backbone: 2.4 M parameters, 4.9 MB in bfloat16.
"""

from configs.demo_amphista import FIELDS
from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """Heads on the frozen demo backbone."""
    return in_family(medusa_config(), "amphista_alpha", FIELDS)
