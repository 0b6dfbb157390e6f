"""The joint law of the first three sampled tokens against exact enumeration, for every lossless
mode, through prefill and the whole decode step; and samplers broken on purpose, which must fail.
"""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from laws import agrees, law_of, total_variation
from planted import decoded, filtered_scores, sampling_of
from scipy.special import softmax
from tiny import decoder, forward_logits, random_params, tiny_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.decoding.acceptance import Accepted, targets
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.sampling import gumbel
from medusa_jax.decoding.state import Engine
from medusa_jax.heads.registry import make_drafter
from medusa_jax.heads.vocabulary import GROUP
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")

V, ROWS, BATCHES, PROMPT = 4, 4096, 4, [2, 3, 1]
TREE = Tree.from_choices([[0], [2], [0, 0], [0, 1], [2, 0]])
SETTINGS = {
    "temperature": {"temperature": 1.3},
    "top_p": {"temperature": 0.8, "top_p": 0.85},
}
# 64 cells and 16,384 draws: the expected total variation of the true law is about 0.02.
FAR = 0.035


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch):
    """Thousands of rows of a few tokens: with 128 slots each the tests would move memory only."""
    monkeypatch.setattr(CpuKernels, "least_slots", 16)


@cache
def model(ids=()):
    """A tiny backbone, and heads that agree with it now and then; they score all tokens or `ids`."""
    config = tiny_arch(vocab_size=V, n_layers=1)
    params = random_params(config, 3, scale=0.8)
    llama, backbone = decoder(config, params)
    heads = HeadsConfig(n_heads=2, lm_head="own", draft_vocab=len(ids))
    drafter = make_drafter(heads, config)
    rng = np.random.default_rng(0)
    kernel = params["lm_head"]["kernel"]
    heads = {
        f"heads_{k}": {
            "layers_0": {"kernel": np.zeros((16, 16)), "bias": np.zeros(16)},
            "lm_head": {"kernel": kernel + 0.5 * rng.standard_normal(kernel.shape)},
        }
        for k in range(2)
    }
    if ids:
        for head in heads.values():
            head["lm_head"] = {"kernel": head["lm_head"]["kernel"][:, ids]}
        heads[GROUP] = {"ids": np.array(ids, np.int32)}
    heads = jax.tree.map(jnp.asarray, heads)
    return config, params, llama, drafter, {"backbone": backbone, "heads": heads}


@cache
def joint_law(setting):
    """p(a) p(b | a) p(c | a, b) by the teacher-forced pass [V, V, V]."""
    config, params, *_ = model()
    sampling = sampling_of(1, **SETTINGS[setting])

    def law(text):
        logits_V = forward_logits(config, params, text)[-1]
        return softmax(np.asarray(filtered_scores(logits_V[None, None], sampling))[0, 0])

    joint = np.zeros((V, V, V))
    for a, b in itertools.product(range(V), repeat=2):
        pair = law(PROMPT)[a] * law([*PROMPT, a])[b]
        joint[a, b] = pair * law([*PROMPT, a, b]) if pair else 0
    assert abs(joint.sum() - 1) < 1e-9
    return joint


def draws(acceptance, setting, tree=TREE, batches=BATCHES, ids=(), **other):
    """First three tokens of many rows, and how often drafts were accepted.

    other: `seed` of all rows, which have their own by default; `mark`: as many ends more that are never met, so
      that a patched function is compiled again.
    """
    _, _, llama, drafter, variables = model(ids)
    engine = Engine(llama, drafter, tree, acceptance)
    ends = [[100 + i for i in range(1 + other.get("mark", 0))]] * ROWS
    fields = {k: [v] * ROWS for k, v in SETTINGS[setting].items()}
    tokens, histogram = [], 0
    for batch in range(batches):
        own = range(batch * ROWS, (batch + 1) * ROWS)
        fields["seed"] = [other.get("seed", seed) for seed in own]
        request = DecodeRequest([PROMPT] * ROWS, [4] * ROWS, ends, **fields)
        progress = decoded(engine, variables, request)
        tokens.append(np.asarray(progress.tokens_BO)[:, :3])
        histogram = histogram + np.asarray(progress.histogram_BL).sum(0)
    return np.concatenate(tokens), histogram / histogram.sum()


@pytest.mark.parametrize(
    "acceptance, setting, ids",
    thinned(
        [(rule, setting, ()) for rule in ("sampled", "rejection") for setting in SETTINGS]
        + [("rejection", "temperature", (0, 1, 3))],
        ("sampled", "top_p", ()),
    ),
)
def test_three_tokens_have_the_models_joint_law(acceptance, setting, ids):
    """Also where the heads never draft one of the tokens."""
    tokens, lengths = draws(acceptance, setting, ids=ids)
    counts, law = law_of(tokens, V), joint_law(setting)
    assert agrees(counts, law)
    assert total_variation(counts, law) < FAR
    assert (lengths > 0.05).all(), lengths  # drafts of every depth took part


def one_noise(key_B, positions_BL, vocab, dtype):
    """The same noise at every position."""
    return gumbel(key_B, jnp.zeros_like(positions_BL), vocab, dtype)


true_rule = targets.accept_down


def likeliest_drafts_pass(kernels, v):
    """The first branch is believed without a look."""
    tree = v.drafts.tree
    leaf = int(np.flatnonzero(tree.depth_M == tree.depth)[0])
    rows = v.length_B.shape
    path_BL = jnp.broadcast_to(jnp.asarray(tree.ancestors_ML[leaf]), (*rows, 3))
    positions_BM = v.positions_BM[:, leaf : leaf + 1]
    logits_B1V = v.logits_BMV[:, leaf : leaf + 1]
    bonus_B1 = targets.target_tokens(kernels, logits_B1V, positions_BM, v.sampling)
    return Accepted(path_BL, jnp.full(rows, tree.depth), bonus_B1[:, 0])


def bonus_of_the_root(kernels, v):
    """The bonus token is the one after the root, not after the accepted path."""
    root = v.logits_BMV[:, :1], v.positions_BM[:, :1], v.sampling
    of_root = targets.target_tokens(kernels, *root)
    return true_rule(kernels, v)._replace(bonus_B=of_root[:, 0])


MUTATIONS = {
    "one_noise": (targets, "gumbel", one_noise),
    "drafts_believed": (targets, "accept_down", likeliest_drafts_pass),
    "bonus_of_the_root": (targets, "accept_down", bonus_of_the_root),
    "no_filters": (targets, "filtered", lambda kernels, logits, sampling: logits),
}


@pytest.mark.parametrize("name", thinned(MUTATIONS, "drafts_believed"))
def test_a_broken_sampler_is_noticed(name, monkeypatch):
    monkeypatch.setattr(*MUTATIONS[name])
    mark = 1 + list(MUTATIONS).index(name)
    tokens, _ = draws("sampled", "top_p", batches=2, mark=mark)
    counts, law = law_of(tokens, V), joint_law("top_p")
    assert not agrees(counts, law)
    assert total_variation(counts, law) > 2 * FAR


def test_typical_acceptance_is_not_lossless():
    """The measure sees what the label says."""
    tokens, _ = draws("typical", "temperature", batches=1)
    assert total_variation(law_of(tokens, V), joint_law("temperature")) > 0.3


@pytest.mark.wide
def test_without_drafts_rejection_is_plain_sampling_draw_for_draw():
    plain, _ = draws("sampled", "top_p", Tree.none(), batches=1)
    again, _ = draws("rejection", "top_p", Tree.none(), batches=1)
    np.testing.assert_array_equal(plain, again)


def test_rows_of_one_seed_draw_different_noise():
    """One seed for all rows: the request id alone makes rows differ, and the law holds."""
    law = joint_law("temperature")
    for acceptance in ("sampled", "rejection"):
        tokens, _ = draws(acceptance, "temperature", batches=1, seed=7)
        assert agrees(law_of(tokens, V), law)
        # Neighbours in the batch are independent: their first tokens fill all pairs.
        pairs = tokens[:, 0].reshape(-1, 2)
        first = law.sum((1, 2))
        assert agrees(law_of(pairs, V), np.outer(first, first))
