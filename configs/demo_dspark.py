"""DSpark for the demo: one layer over blocks of four guesses, with a Markov head of rank 64.

    python train.py --config=configs/demo_dspark.py --workdir=work/demo/dspark

With the backbone and the text of demo_medusa.py. The loss is the cross-entropy with the backbone's
distribution: the gradient of the paper's L1 loss is small where the distributions share nothing, and these steps are
too few for it.
"""

from configs.demo_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.dflash import DSparkConfig


def get_config() -> Config:
    """The block on the frozen demo backbone."""
    cfg = medusa_config()
    # The last token of the vocabulary is rare in the text; its embedding stands for "to be guessed".
    cfg.heads = DSparkConfig(
        n_heads=4,
        n_layers=1,
        tap_layers="2,5,8",
        kv_heads=4,
        markov_rank=64,
        confidence=True,
    )
    cfg.data.cache_features = "float8"
    cfg.optim.lr = 5e-3
    cfg.train.anchors = 128
    cfg.train.label_weight, cfg.train.teacher_weight = 0.1, 1.0
    cfg.train.confidence_weight = 1.0
    cfg.train.lambda_decay = 0.78
    return cfg
