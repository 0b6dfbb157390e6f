"""EAGLE-3 for the demo: one decoder layer that reads inside the backbone, trees up to four deep.

    python train.py --config=configs/demo_eagle3.py --workdir=work/demo/eagle3

With the backbone and the text of demo_medusa.py. 2.1 M parameters. The last stream is the output of the last layer,
which helps a small model more than the paper's L - 3 (configs/smollm2_eagle3.py).
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """The layer on the frozen demo backbone; it learns the backbone's distribution over four levels."""
    fields = {
        "heads.n_layers": 1,
        "heads.tap_layers": "2,5,8",
        "data.cache_features": "float8",
        "train.teacher_weight": 1.0,
    }
    return in_family(medusa_config(), "eagle3", fields)
