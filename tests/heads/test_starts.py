"""Where drafters start, as the backbone's LM head, in the layers that keep the hidden state; how many parameters
they have, by papers' tables and published files."""

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from family import D, drafter_of, parameters, stored_base
from numpy_layers import numpy_norm

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.heads.amphista import AmphistaAlphaConfig, AmphistaConfig
from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.heads.hydrapp import HydraPPConfig

pytestmark = pytest.mark.usefixtures("x64")


def kept(hidden, scale):
    return [hidden[..., -D:]] * 4  # of EAGLE-3 the last stream


def normed(hidden, scale):
    """A norm that keeps the size."""
    return [numpy_norm(np.sqrt((scale**2).mean()), hidden)] * 4


def normed_by_stages(hidden, scale):
    """Once or twice: both heads of each stage."""
    once = normed(hidden, scale)[0]
    return [once, once, *normed(once, scale)[:2]]


MEDUSA = [
    HeadsConfig(lm_head=kind, n_layers=n_layers, rank=16)
    for kind in ("own", "shared", "low_rank")
    for n_layers in (1, 2)
]


@pytest.mark.parametrize(
    ("heads", "features", "tied"),
    [
        *((heads, kept, tied) for heads in MEDUSA for tied in (False, True)),
        (HydraConfig(n_layers=2), kept, False),
        (HydraPPConfig(n_layers=3), normed, False),
        (AmphistaConfig(position_encoding=False), normed_by_stages, False),
        (EagleConfig(n_heads=4, n_layers=2), kept, False),
        (Eagle3Config(n_heads=4), kept, False),
    ],
    ids=lambda x: getattr(x, "drafter", ""),
)
def test_every_head_starts_as_the_backbones_lm_head(heads, features, tied):
    """Of what its layers pass on; EAGLE-3's own norm is the backbone's at first."""
    backbone = stored_base(tie_embeddings=tied)
    drafter, _ = drafter_of(heads, backbone)
    start = family.start_of(drafter, backbone)
    rows = family.random_rows(np.random.default_rng(0), E=family.width(drafter))
    scale = backbone.params["norm"]["scale"]
    run = jax.jit(lambda p: drafter.features(p, backbone, TextRows(*rows)))
    for k, (got, wanted) in enumerate(zip(run(start), features(rows[0], scale))):
        assert_close(got, wanted, dtype="float32")  # the type of fresh parameters
        logits = drafter.head_logits(start, backbone, k, got)
        read = numpy_norm(scale, wanted) if heads.drafter == "eagle3" else wanted
        assert logits.dtype == jnp.float64
        assert_close(logits, backbone.lm_head(jnp.asarray(read)), dtype="float32")


def test_low_rank_starts_as_the_best_approximation():
    backbone = stored_base()
    drafter, _ = drafter_of(HeadsConfig(lm_head="low_rank", rank=5), backbone)
    start = family.start_of(drafter, backbone)["heads_0"]["lm_head"]
    kernel = backbone.params["lm_head"]["kernel"]
    error = np.linalg.norm(kernel - start["down"] @ start["up"])
    singular = np.linalg.svd(kernel, compute_uv=False)
    # The type of fresh parameters.
    assert_close(error, np.sqrt((singular[5:] ** 2).sum()), dtype="float32")


def test_hydra_may_start_at_random():
    backbone = stored_base()
    drafter, _ = drafter_of(HydraConfig(n_layers=2, skip="random"), backbone)
    start = family.start_of(drafter, backbone)
    rows = family.random_rows(np.random.default_rng(0))
    features = jax.jit(lambda p: drafter.features(p, backbone, TextRows(*rows)))(start)
    assert not np.allclose(features[0], rows[0], atol=0.1)
    assert not np.asarray(start["heads_1"]["layers_0"]["linear"]["kernel"]).any()


@pytest.mark.parametrize(
    "heads", [HydraConfig(dropout=0.5, n_layers=1), *wide(AmphistaConfig(dropout=0.5))]
)
def test_dropout_needs_a_key_and_leaves_the_mean(heads):
    backbone = stored_base()
    drafter, params = drafter_of(heads, backbone)
    rows = family.random_rows(np.random.default_rng(0))
    run = jax.jit(lambda key: drafter.features(params, backbone, TextRows(*rows, key)))
    assert np.array_equal(run(None), run(None))
    one, two = run(jax.random.key(0)), run(jax.random.key(1))
    assert not np.array_equal(one, two)
    assert np.array_equal(one, run(jax.random.key(0)))
    zeros = np.asarray(one) == 0  # dropped before the LM head
    assert 0.4 < zeros.mean() < 0.6 and not np.array_equal(zeros[0], zeros[1])


VICUNA = [
    LlamaConfig(32000, width, 1, heads, heads, 128, d_ff)
    for heads, width, d_ff in ((32, 4096, 11008), (40, 5120, 13824), (52, 6656, 17920))
]
LOW_RANK = {64: (0.62, 0.96, 1.61), 128: (0.62, 0.97, 1.62)}
LOW_RANK |= {256: (0.64, 0.99, 1.64), 512: (0.68, 1.03, 1.68)}


@pytest.mark.parametrize(
    ("heads", "billions"),
    [
        (HydraConfig(), (0.99, 1.39, 2.09)),
        # The released checkpoints tie layers 2 to 4 of a head.
        (HydraPPConfig(tie_layers=True), (1.26, 1.81, 2.80)),
        (HydraPPConfig(tie_layers=False), (1.40, 2.02, 3.16)),
        (EagleConfig(n_heads=1), (0.24, 0.37, 0.62)),
        (EagleConfig(n_heads=5), (0.24, 0.37, 0.62)),
        (AmphistaConfig(), (1.13, 1.60, 2.45)),
        *wide(
            *((AmphistaConfig(lm_head="low_rank", rank=r), n) for r, n in LOW_RANK.items())
        ),
    ],
)
def test_sizes_for_vicuna_are_those_of_the_papers(heads, billions):
    """7B, 13B and 33B, within 1% of a table or its last digit."""
    for llama, expected in zip(VICUNA, billions):
        n = parameters(heads, llama) / 1e9
        assert abs(n - expected) < max(0.01 * expected, 0.006)


def test_what_amphista_alpha_adds():
    full, width = parameters(AmphistaConfig(), VICUNA[0]), VICUNA[0].d_model
    assert parameters(AmphistaAlphaConfig(), VICUNA[0]) - full == 4 * width**2 + width


def test_eagle3_for_llama_8b():
    """The published file, with an LM head of 32,000 tokens, has 849 MB in 16 bits."""
    llama = LlamaConfig(128256, 4096, 32, 32, 8, 128, 14336)
    for depth in (1, 7):
        heads = Eagle3Config(n_heads=depth, draft_vocab=32000)
        assert parameters(heads, llama) == 424_689_664
