"""EAGLE-3 for SmolLM2-135M-Instruct: one decoder layer, trees up to four deep, over 8,192 tokens.

    xz -dk research/smollm2/answers*.xz
    python train.py --config=configs/smollm2_eagle3.py --workdir=work/smollm2/eagle3_first \\
        --config.train.levels=1 --config.train.steps=900 --config.optim.lr=3e-3 \\
        --config.optim.schedule=constant
    python train.py --config=configs/smollm2_eagle3.py --workdir=work/smollm2/eagle3 \\
        --config.train.heads_path=work/smollm2/eagle3_first/export

The first level alone takes a third of the time of all four, so it is learnt first. Hidden states are
cached in 8 bits, since they come with four streams from inside the model: 2.9 GB per million tokens.
5.4 M parameters. The last two streams help such a small model: after 160 steps of 4 x 512 tokens on 484
conversations the first level's held-out top-1 was 0.364 with the paper's layers (2, 15 and 27), 0.370
with 2, 15 and 30, 0.395 with these four, and 0.399 with seven.
"""

from configs.smollm2_medusa import get_config as medusa_config
from medusa_jax.config import Config
from medusa_jax.training.own_recipe import in_family


def get_config() -> Config:
    """The layer on the frozen model; it learns the model's distribution over four levels."""
    fields = {
        "heads.lm_head": "shared",
        "heads.tap_layers": "2,15,27,30",
        "data.source": "research/smollm2/answers.jsonl,research/smollm2/answers_2.jsonl",
        "data.eval_source": "",
        "data.cache_features": "float8",
        "train.steps": 750,
    }
    return in_family(medusa_config(), "eagle3", fields)
