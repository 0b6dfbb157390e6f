"""Hydra heads for SmolLM2-135M-Instruct: 4 heads of one hidden layer over 8,192 tokens.

    python train.py --config=configs/smollm2_hydra.py --workdir=work/smollm2/hydra

Text, draft vocabulary and cached hidden states are those of smollm2_medusa.py. 4.6 M
parameters.
"""

from configs.smollm2_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """Heads on the frozen model."""
    return in_family(medusa_config(), "hydra", {})
