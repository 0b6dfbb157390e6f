"""Configurations that are refused before anything is read or compiled."""

import pytest
from training_setup import tiny_config

from medusa_jax.errors import UserError
from medusa_jax.sharding import make_mesh
from medusa_jax.training import checks

CACHED = {"data.cache_features": "float32", "data.packing": "first_fit"}
ADAPTERS = {"optim.name": "adamw", "lora.rank": 4}


@pytest.mark.parametrize(
    ("stage", "fields", "words"),
    [
        ("backbone", {"train.batch_size": 6}, "multiple of accumulation"),
        ("backbone", {"optim.lr": float("nan")}, "optim.lr is from 0 to .*, not nan"),
        ("backbone", {"train.lambda_decay": -5.0}, "train.lambda_decay is from 0"),
        ("backbone", {"optim.b1": 2.0}, "optim.b1 is from 0 to .*, not 2.0"),
        ("backbone", {"train.steps": "5"}, "train.steps should be int, not '5'"),
        ("medusa1", {"train.feature_weight": 1.0}, "heads.lm_head shared, not 'own'"),
        ("backbone", {"data.seq_len": 1000}, "from 3 to 64, not 1000"),
        ("backbone", {"data.format": "chat"}, "did you mean 'messages'"),
        ("medusa1", ADAPTERS, "no adapters"),
        ("medusa2", {"model.quantise": "nf4"}, "trains the backbone itself"),
        ("medusa1", {"train.backbone_loss": "kl"}, "trains no backbone"),
        ("native", {"train.backbone_loss": "kl"}, r"model\.path"),
        ("medusa2", CACHED, "a backbone and rows that do not change"),
    ],
)
def test_what_is_refused(stage, fields, words):
    cfg = tiny_config("", stage, accumulation=4)
    for path, value in fields.items():
        group, name = path.split(".")
        setattr(getattr(cfg, group), name, value)
    with pytest.raises(UserError, match=words) as error:
        checks.check(cfg)
        checks.settle(cfg, cfg.model.arch, make_mesh())
    assert "\n" not in str(error.value)
