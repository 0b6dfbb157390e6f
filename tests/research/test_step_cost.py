"""Shapes without weights: random ones where and as decoding reads them, and nothing but sizes."""

import gc
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from tiny import tiny_arch

from medusa_jax.api import weightless
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.interop.hf_writer import config_to_hf
from medusa_jax.model.stored import Storage
from research import step_cost
from research import weights as at_random

TINY = tiny_arch(vocab_size=40, n_layers=2, max_position=512)


def drafter_of(name, config):
    return make_drafter(drafter_class(name).Config(drafter=name, n_heads=4), config)


def shapes_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("weights", ["", *wide("int8")])
@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_lie_as_decoding_reads_them(weights, tied):
    config, storage = replace(TINY, tie_embeddings=tied), Storage(0, weights)
    drafter = drafter_of("hydrapp", config)
    found = {
        "backbone": at_random.random_backbone(config, jnp.bfloat16, storage),
        "heads": at_random.random_heads(drafter, jnp.bfloat16, storage),
    }
    wanted = weightless.abstract_variables(config, drafter, jnp.bfloat16, storage)
    assert shapes_of(found) == shapes_of(wanted)
    values = [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]
    assert all(np.isfinite(v).all() and v.any() for v in values)


@pytest.fixture
def old_objects_aside():
    """What tests before left is not looked through at every collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.usefixtures("old_objects_aside")
def test_an_entry_is_made_and_placed_before_the_next(monkeypatch):
    """Eight layers: while one is placed, the device holds what is done and that layer, no more."""
    config = replace(TINY, n_layers=8)
    place = at_random.place_part
    before, done, extra = 0, [], []

    def watched(config, part, *rest):
        own = sum(x.nbytes for x in jax.tree.leaves(part))
        extra.append(live_bytes() - before - own - sum(done))
        placed = place(config, part, *rest)
        done.append(sum(x.nbytes for x in jax.tree.leaves(placed)))
        return placed

    at_random.random_backbone(TINY, jnp.float32, Storage())  # compiles, makes its constants
    monkeypatch.setattr(at_random, "place_part", watched)
    before = live_bytes()
    at_random.random_backbone(config, jnp.float32, Storage())
    assert len(extra) == 8 + 3 and max(extra) < 1000 < min(sorted(done)[-8:])


@pytest.mark.wide
def test_the_command_measures_a_small_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_cost, "read_bandwidth", lambda n_bytes: 1e9)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(TINY)))
    sizes = ["--sizes=8,16", "--context=20", "--batch=2"]
    flags = [f"--shape={tmp_path}", "--drafters=medusa", "--repeats=1", *sizes]
    assert step_cost.main([*flags, f"--out={tmp_path}"]) == 0
    facts = json.loads((tmp_path / "step_cost.json").read_text())
    [row] = facts["drafters"]
    assert row["drafter"] == "medusa" and len(row["step_latency_ratios"]) == 2
    assert all(ratio > 0 for ratio in row["step_latency_ratios"])
    # Four heads in float32: a residual block with its bias and an LM head each.
    D, V = TINY.d_model, TINY.vocab_size
    assert row["head_bytes"] == 4 * 4 * (D * D + D + D * V)
    plain = facts["plain"]
    # Two rows of 20 tokens; of the embedding table one row a token.
    c = TINY
    cached = 2 * c.n_layers * c.n_kv_heads * c.head_dim * 20 * 4
    weights = facts["weight_bytes"] - 4 * D * V + 4 * D
    assert plain["bytes_needed"] == weights + 2 * cached
    assert plain["bandwidth_share"] == pytest.approx(
        plain["bytes_needed"] / plain["step_seconds"] / 1e9
    )
    printed = capsys.readouterr().out
    assert "| drafter | heads, GB | 8 nodes | 16 nodes |" in printed
