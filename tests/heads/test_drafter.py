"""What all drafters share: the best guesses by scores, and fields that are refused, each with a sentence."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.amphista import AmphistaConfig
from medusa_jax.heads.dflash import DFlashConfig
from medusa_jax.heads.draft_model import DraftModelConfig
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.heads.prompt_lookup import PromptLookupConfig
from medusa_jax.heads.registry import make_drafter
from medusa_jax.kernels.cuda import TOP_K_PARTS, TOP_K_WIDTH, CudaKernels
from medusa_jax.model.kernels import Kernels

LEAST = TOP_K_PARTS * TOP_K_WIDTH


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernels", [Kernels(), CudaKernels()])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([1, 4]),
    columns=st.sampled_from([LEAST, LEAST + 77]),
    n=st.integers(1, 12),
    kinds=st.sampled_from([2, 5, 1_000_000]),
    seed=st.integers(0, 2**31),
)
def test_best_places_are_in_order_and_the_first_of_equal_ones(
    kernels, rows, columns, n, kinds, seed
):
    """As a stable sort has them; few kinds of scores: many are equal, some are -inf."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, kinds, (rows, columns)).astype(np.float32)
    scores[scores == 0] = -np.inf
    found = kernels.top_k(jnp.asarray(scores), n)
    # With 64-bit integers too: tokens are carried by a loop.
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.argsort(-scores, kind="stable")[:, :n])


CONFIG = tiny_arch()
NOT_TAPS = r"heads\.tap_layers are numbers from 0 to 2"
NOT_SIZES = r"heads\.attention_heads 4, .* do not fit together"


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (HeadsConfig(drafter="medsua"), r"'medsua'.*did you mean 'medusa'"),
        (HeadsConfig(lm_head="tied"), "own, shared, low_rank, not 'tied'"),
        (HeadsConfig(lm_head="low_rank", rank=17), "heads.rank is from 1 to 16, not 17"),
        (HeadsConfig("hydra", n_layers=0), "heads.n_layers is from 1 to 127, not 0"),
        (HeadsConfig(n_heads=9999), "heads.n_heads is from 1 to 127, not 9999"),
        (HeadsConfig(n_layers=0, lm_head="shared"), "heads.n_layers 0 needs LM heads"),
        (HeadsConfig(draft_vocab=24), r"heads\.draft_vocab is from 0"),
        (HeadsConfig(draft_vocab=3, rank=4, lm_head="low_rank"), "rank is from 1 to 3"),
        (HydraConfig(skip="zero"), "identity, random, fixed, not 'zero'"),
        (HydraConfig(dropout=1.0), "heads.dropout is from 0 to below 1"),
        (HydraConfig(drafter="medusa"), "'medusa' does not take .* HydraConfig"),
        (AmphistaConfig(stages=5), "heads.stages is from 0 to 4, not 5"),
        *((Eagle3Config(tap_layers=t), NOT_TAPS) for t in ("1,2,3", "low")),
        *((Eagle3Config(**{n: x}), NOT_SIZES) for n, x in (("kv_heads", 3), ("d_ff", -1))),
        (DFlashConfig(mask_token=23), "heads.mask_token is from -1 to 22, not 23"),
        (DFlashConfig(n_taps=0), "heads.n_taps is from 1"),
        (DFlashConfig(confidence=True), "heads.markov_rank is from 1"),
        (PromptLookupConfig(tokens=0), "prompt_lookup: tokens is from 1"),
        (DraftModelConfig(gamma=0, arch=CONFIG), "gamma is from 1 to 16, not 0"),
    ],
)
def test_fields_that_make_no_sense(heads, message):
    with pytest.raises(UserError, match=message):
        make_drafter(heads, CONFIG)
