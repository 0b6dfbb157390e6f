"""DSpark for Llama-3.1-8B-Instruct (arXiv 2607.05147): seven guesses from one pass over a block.

    python train.py --config=configs/llama31_8b_dspark.py --workdir=runs/llama31_8b_dspark
    python train.py --config=configs/llama31_8b_dspark.py --config.dry_run   (shapes and memory only)

On answers that the model has written (configs/llama31_8b.py says how). Loss, learning rate, warm-up, clipping
and layers that are read are the authors'; two layers, which in their ablation beat five of DFlash. Weights
of the seven guesses fall by exp(-1/4), and 512 random positions of a row are roots of blocks. Their mask token is an
unused one of the vocabulary, so ours is the first reserved one.
0.59 B parameters, of which the Markov head over 128,256 tokens has 0.07 B.

What to expect: for Qwen3-8B the paper reports 3.72 tokens per step on MT-bench at T = 1, where EAGLE-3 has
2.66 on the same data. The paper has no figure for this model.
"""

from configs.llama31_8b import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.heads.dflash import DSparkConfig


def get_config() -> Config:
    """The recipe; model, text and precision are those of llama31_8b.py."""
    cfg = medusa_config()
    cfg.heads = DSparkConfig(mask_token=128002, confidence=True)
    cfg.optim.lr, cfg.optim.clip_norm, cfg.optim.warmup_steps = 6e-4, 1.0, -1
    cfg.train.batch_size, cfg.train.accumulation, cfg.train.epochs = 32, 16, 10
    cfg.train.anchors = 512
    cfg.train.label_weight, cfg.train.distance_weight = 0.1, 0.9
    cfg.train.confidence_weight = 1.0
    cfg.train.lambda_decay = 0.7788
    return cfg
