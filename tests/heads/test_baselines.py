"""Drafters without heads: what each drafts and keeps, against a re-computation.

That their text is plain decoding's is tested along with all other drafters' (test_contract.py).
"""

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import decoded
from tiny import decoder, random_params, tiny_arch

from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import Engine
from medusa_jax.errors import UserError
from medusa_jax.heads.draft_model import DraftModelConfig
from medusa_jax.heads.drafter import DraftRequest, Ranked
from medusa_jax.heads.names import BASELINES
from medusa_jax.heads.prompt_lookup import PromptLookup, PromptLookupConfig
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
CONFIG = tiny_arch(vocab_size=7)


def model(seed=1, config=CONFIG):
    params = random_params(config, seed)
    return (params, *decoder(config, params))


def test_a_drafter_that_drafts_nothing_is_refused(monkeypatch):
    """One of a user's, which does not check its own fields."""
    monkeypatch.setattr(PromptLookup, "check", lambda self: None)
    with pytest.raises(UserError, match="drafts of prompt_lookup is from 1"):
        make_drafter(PromptLookupConfig(tokens=0), CONFIG)


def test_prompt_lookup_only_copies():
    drafter = make_drafter(PromptLookupConfig(tokens=4), CONFIG)
    assert drafter.default_tree == Tree.copies(4)
    with pytest.raises(UserError, match="only copies"):
        drafter.check_tree(Tree.from_choices([[0], [-1]]))


# The draft model.


@pytest.mark.wide
@pytest.mark.parametrize(
    "acceptance, tree",
    [
        ("greedy", Tree.chain(4)),
        ("sampled", Tree.from_choices([[0], [1], [0, 0], [1, 0], [0, 0, 0]])),
        ("rejection", Tree.from_choices([[0], [1], [0, 0], [1, 0]])),
    ],
)
def test_a_draft_model_that_is_the_model_is_always_right(acceptance, tree):
    """Its keys, values and masks are those of the text and of each node's own path, to the last bit
    that decides a token: every step but a last one accepts a whole path. Rows end apart. Four tokens
    that only it has, with large logits, are never drafted."""
    config, arch = (tiny_arch(vocab_size=size, n_layers=1) for size in (60, 64))
    params, llama, backbone = model(config=config)
    ids, factor = np.arange(64) % 60, 1 + 2 * (np.arange(64) > 59)
    embedding, kernel = params["embed_tokens"]["embedding"], params["lm_head"]["kernel"]
    padded = {"embed_tokens": {"embedding": embedding[ids]}}
    padded |= {"lm_head": {"kernel": kernel[:, ids] * factor}}
    _, draft_model = decoder(arch, params | padded)
    drafter = make_drafter(DraftModelConfig(arch=arch), config)
    L = tree.path_length
    engine = Engine(llama, drafter, tree, acceptance)
    variables = {"backbone": backbone, "heads": {"model": draft_model}}
    steps = 26 if acceptance == "greedy" else 5  # the greedy row outgrows its first cache
    request = DecodeRequest(
        [[1, 2, 3], [4], list(range(40))],
        [1 + 8 * L, 1 + 2 * L, 1 + steps * L],
        temperature=None if acceptance == "greedy" else [1.0, 0.0, 0.7],
        seed=[3, 4, 5],
    )
    progress = decoded(engine, variables, request)
    histogram = np.asarray(progress.histogram_BL)
    assert histogram[:, -1].tolist() == [8, 2, steps] and histogram[:, :-1].sum() == 0


# All of them.


def test_tokens_that_the_draft_model_lacks_are_never_drafted():
    drafter = make_drafter(DraftModelConfig(arch=tiny_arch(vocab_size=5)), CONFIG)
    _, llama, backbone = model()
    scores = []

    def rank(depth, logits):
        scores.append(np.asarray(logits).reshape(-1))
        return Ranked(logits, logits)

    request = DraftRequest(jnp.array([6]), Tree.chain(2), rank)
    heads = {"model": model(config=drafter.heads.arch)[2]}
    state = drafter.start(1, 40, np.float64)
    drafter.propose(heads, Backbone(llama, backbone), state, request)
    assert [np.isneginf(x).tolist() for x in scores] == 2 * [[False] * 5 + [True] * 2]


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_there_is_nothing_to_train(name):
    drafter, _ = family.baseline_of(name, CONFIG)
    backbone = Backbone(Llama(CONFIG), {})
    with pytest.raises(UserError, match=f"{name} has no heads to train or to load"):
        drafter.init(jax.random.key(0), backbone)
    with pytest.raises(UserError, match="choose a tree with --tree"):
        drafter.features({}, backbone, None)
