"""DSpark for SmolLM2-135M-Instruct: two layers over blocks of six guesses, over 8,192 tokens.

    xz -dk research/smollm2/answers*.xz
    python train.py --config=configs/smollm2_dspark.py --workdir=work/smollm2/dspark

With the text and the layers that smollm2_eagle3.py reads. Token 5 never occurs in text, so its embedding
stands for a token to be guessed. 12.1 M parameters.
"""

from configs.smollm2_eagle3 import get_config as eagle3_config
from medusa_jax.config import Config
from medusa_jax.heads.dflash import DSparkConfig


def get_config() -> Config:
    """The block on the frozen model."""
    cfg = eagle3_config()
    cfg.heads = DSparkConfig(
        n_heads=6, draft_vocab=8192, tap_layers="2,15,27,30", mask_token=5, markov_rank=64,
        confidence=True,
    )  # fmt: skip
    cfg.train.anchors = 192
    # As in demo_dspark.py.
    cfg.train.label_weight, cfg.train.confidence_weight = 0.1, 1.0
    cfg.train.levels, cfg.train.lambda_decay = 1, 0.7788
    # Repetitive answers teach blocks to copy.
    cfg.data.max_repeats = 1.0
    cfg.optim.name, cfg.optim.lr = "muon", 3e-3
    cfg.train.steps = 4700
    return cfg
