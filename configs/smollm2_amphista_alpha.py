"""Amphista-alpha heads for SmolLM2-135M-Instruct: as smollm2_amphista.py, two attention layers.

    python train.py --config=configs/smollm2_amphista_alpha.py --workdir=work/smollm2/amphista_alpha

Text, draft vocabulary and cached hidden states are those of smollm2_medusa.py. 8.9 M
parameters.
"""

from configs.smollm2_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """Heads on the frozen model."""
    fields = {"heads.stage_d_ff": 512}
    return in_family(medusa_config(), "amphista_alpha", fields)
