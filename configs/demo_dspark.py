"""DSpark for the demo: one layer over blocks of four guesses, with a Markov head of rank 64.

    python train.py --config=configs/demo_dspark.py --workdir=work/demo/dspark

With the backbone and the text of demo_medusa.py, and the paper's loss.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.dflash import DSparkConfig


def get_config() -> Config:
    """The block on the frozen demo backbone."""
    cfg = medusa_config()
    # The last token of the vocabulary is rare in the text; its embedding stands for "to be guessed".
    cfg.heads = DSparkConfig(n_heads=4, n_layers=1, tap_layers="1,3,5", markov_rank=64)
    cfg.data.cache_features = "float8"
    cfg.optim.lr = 2e-3
    cfg.train.label_weight, cfg.train.distance_weight = 0.1, 0.9
    cfg.train.lambda_decay = 0.78
    return cfg
