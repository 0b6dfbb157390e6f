"""EAGLE-1 for SmolLM2-135M-Instruct: one decoder layer, trees up to four deep, over 8,192 tokens.

    python train.py --config=configs/smollm2_eagle.py --workdir=work/smollm2/eagle

Text, draft vocabulary and cached hidden states are those of smollm2_medusa.py. 4.2 M parameters.
"""

from configs.smollm2_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """The layer on the frozen model; it learns the next hidden state and its distribution."""
    fields = {
        "heads.fc_bias": True,
        # Attention learns to copy what the text repeats, and needs text that does.
        "train.induction_weight": 0.5,
        "data.max_repeats": 1.0,
    }
    return in_family(medusa_config(), "eagle", fields)
