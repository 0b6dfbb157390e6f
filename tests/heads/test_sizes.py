"""How many parameters drafters have: papers' tables and published files."""

import pytest
from family import parameters

from medusa_jax.config import LlamaConfig
from medusa_jax.heads.amphista import AmphistaAlphaConfig, AmphistaConfig
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.heads.hydrapp import HydraPPConfig

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
        *((AmphistaConfig(lm_head="low_rank", rank=r), n) for r, n in LOW_RANK.items()),
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
