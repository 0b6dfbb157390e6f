"""Parts of single studies: settings of a training, random weights."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from tiny import tiny_arch

from medusa_jax.errors import UserError
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.model.stored import Storage
from research import weights as made
from research.family.command import refuse_other


def test_a_training_with_other_settings_is_not_taken_for_this_one(tmp_path):
    asked = {room: {} for room in ("heads", "data", "optim", "lora")}
    asked["train"] = {"steps": 1200, "eval_every": 150, "dtype": "bfloat16"}
    found = asked | {"train": {"steps": 1200, "eval_every": 75, "dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(found))
    refuse_other(tmp_path, asked)  # how often it was watched does not matter
    asked["train"]["steps"] = 400
    with pytest.raises(UserError, match=r"with train.steps 1200 \(asked: 400\)"):
        refuse_other(tmp_path, asked)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"no readable config.json"):
        refuse_other(tmp_path, asked)


TINY = tiny_arch(vocab_size=40, n_layers=2, max_position=512)


@pytest.mark.parametrize("weights", ["", *wide("int8")])
@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_lie_as_decoding_reads_them(weights, tied):
    config, storage = replace(TINY, tie_embeddings=tied), Storage(0, weights)
    drafter = make_drafter(drafter_class("hydrapp").Config(n_heads=4), config)
    found = {
        "backbone": made.random_backbone(config, jnp.bfloat16, storage),
        "heads": made.random_heads(drafter, jnp.bfloat16, storage),
    }
    wanted = made.abstract_variables(config, drafter, jnp.bfloat16, storage)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), t) for t in (found, wanted)]
    assert shapes[0] == shapes[1]
    values = [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]
    assert all(np.isfinite(v).all() and v.any() for v in values)
