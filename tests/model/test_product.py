"""Kernels in tiles give what the kernels give, for few rows and for many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from planted import decoder, random_params, tiny_config

from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.heads import Backbone, make_drafter
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.model.product import MANY_ROWS, TILE, product, tile_kernels, tiled_product
from medusa_jax.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
# Every width is a multiple of the tile's but the vocabulary's.
CONFIG = tiny_config(
    vocab_size=70, d_model=64, head_dim=32, d_ff=128, n_heads=4, n_kv_heads=2
)


@pytest.mark.parametrize("rows", [(1,), (3,), (2, 1), (MANY_ROWS - 1,), (2, MANY_ROWS)])
def test_a_product_in_tiles(rows):
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((48, 3 * TILE))
    x = rng.standard_normal((*rows, 48))
    tiles = tile_kernels({"kernel": kernel})["tiles"]
    assert tiles.shape == (3, 48, TILE)
    np.testing.assert_array_equal(tiles[1], kernel[:, TILE : 2 * TILE])
    got = tiled_product(jnp.array(x), jnp.array(tiles))
    assert_close(got, product(x, kernel))


def test_what_is_put_in_tiles():
    def zeros(*shape):
        return np.zeros(shape)

    params = {
        "wide": {"kernel": zeros(8, 2, TILE), "bias": zeros(2, TILE)},  # fused, two parts
        "odd": {"kernel": zeros(8, TILE + 1)},
        "embed": {"embedding": zeros(TILE, TILE)},
        "quantised": {"codes": zeros(8, TILE), "scales": zeros(TILE)},
        "lm_head": {"down": zeros(8, TILE), "up": zeros(TILE, TILE + 2)},
    }
    shapes = jax.tree.map(
        np.shape, tile_kernels(params), is_leaf=lambda x: hasattr(x, "shape")
    )
    assert shapes == {
        "wide": {"tiles": (2, 8, TILE), "bias": (2, TILE)},
        "odd": {"kernel": (8, TILE + 1)},
        "embed": {"embedding": (TILE, TILE)},
        "quantised": {"codes": (8, TILE), "scales": (TILE,)},
        "lm_head": {"down_tiles": (1, 8, TILE), "up": (TILE, TILE + 2)},
    }


@pytest.mark.parametrize(
    "heads",
    [
        HeadsConfig(n_heads=2, n_layers=2),
        HeadsConfig(n_heads=2, lm_head="low_rank", rank=TILE),
        HydraConfig(n_heads=2, n_layers=2, lm_head="low_rank", rank=TILE),
    ],
)
@pytest.mark.parametrize("vocab", [70, 2 * TILE])
def test_drafts_and_text_are_those_of_plain_kernels(heads, vocab):
    config = CONFIG if vocab == 70 else tiny_config(**vars(CONFIG) | {"vocab_size": vocab})
    params = random_params(config, 0)
    llama, backbone = decoder(config, params)
    drafter = make_drafter(heads, config)
    start = drafter.init(jax.random.key(0), Backbone(llama, backbone))
    rng = np.random.default_rng(1)
    heads_params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(np.shape(x)), start)
    plain = {"backbone": backbone, "heads": heads_params}
    tiled = tile_kernels(plain)
    assert "tiles" in tiled["backbone"]["layers_0"]["mlp"]["gate_up_proj"]
    assert ("tiles" in tiled["backbone"]["lm_head"]) == (vocab != 70)
    engine = loop.Engine(llama, drafter, Tree.cartesian([2, 2]))
    prompts = [rng.integers(0, vocab, n).tolist() for n in (128, 3)]
    request = loop.Request(prompts, [30, 40])
    expected, got = (loop.generate(engine, v, request) for v in (plain, tiled))
    np.testing.assert_array_equal(got.tokens_BO, expected.tokens_BO)
    # The same drafts were accepted, too.
    np.testing.assert_array_equal(got.histogram_BL, expected.histogram_BL)
    assert np.asarray(got.histogram_BL)[:, 1:].sum() > 0
