"""Constraints in the step: drafted text is plain constrained decoding's, whatever the constraint is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from guides import EOS, Rule, V
from planted import LIMITS, PROMPTS, SAMPLED, planted, random_model, texts_of
from tiny import forward_logits, tiny_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.constrained import look_ahead
from medusa_jax.decoding.masks import NO_TOKEN
from medusa_jax.decoding.state import Engine
from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
NEW = 40
CONFIG = tiny_arch(vocab_size=V, n_layers=1)


def request_of(acceptance, seed, dead=False, penalties=None):
    """The middle row has no constraint."""
    fields = SAMPLED if acceptance != "greedy" else {}
    guides = [Rule(seed, dead), None, Rule(seed + 1, dead)]
    stops = [((EOS,),)] * 3
    more = {"guides": guides, "penalties": penalties, "stops": stops}
    return loop.Request(PROMPTS, LIMITS, **fields, **more)


def decode(tree, heads, acceptance, seed, drafter=None, **more):
    _, llama, backbone = random_model(CONFIG, seed % 3)
    engine = Engine(llama, drafter or planted(CONFIG), tree, acceptance)
    variables = {"backbone": backbone, "heads": heads}
    return loop.generate(engine, variables, request_of(acceptance, seed, **more))


def allowed_everywhere(rule, text):
    return all(token in rule.tokens(text[:t]) for t, token in enumerate(text))


def test_the_plain_loop_takes_the_best_allowed_token():
    params, *_ = random_model(CONFIG, 0)
    progress = decode(Tree.none(), {}, "greedy", 0)
    for row, text in enumerate(texts_of(progress)):
        rule = request_of("greedy", 0).guides[row]
        logits = forward_logits(CONFIG, params, PROMPTS[row] + text)
        for t, token in enumerate(text):
            scores = logits[len(PROMPTS[row]) + t - 1]
            allowed = rule.tokens(text[:t]) if rule else range(V)
            assert token == max(allowed, key=lambda i, s=scores: s[i])
        assert row == 1 or allowed_everywhere(rule, text)


def test_a_text_that_is_forced_is_drafted():
    """Untrained heads know nothing: what is accepted is what the constraint leaves alone."""
    params, llama, backbone = random_model(CONFIG, 0)
    drafter = make_drafter(HeadsConfig(n_heads=3), CONFIG)
    heads = drafter.init(jax.random.key(0), Backbone(Llama(CONFIG, jnp.float64), params))

    def lengths(forcing):
        request = loop.Request([[4]], [NEW + 1], guides=[Rule(3, forcing=forcing)])
        engine = Engine(llama, drafter, Tree.chain(3))
        variables = {"backbone": backbone, "heads": heads}
        return np.asarray(loop.generate(engine, variables, request).histogram_BL)[0]

    assert lengths(1.0).tolist() == [0, 0, 0, 10]
    assert lengths(0.0)[3] < 5


@pytest.mark.parametrize("acceptance", ["rejection", *wide("typical")])
def test_other_rules_obey(acceptance):
    params, *_ = random_model(CONFIG, 0)
    drafter = make_drafter(HeadsConfig(n_heads=2), CONFIG)
    heads = drafter.init(jax.random.key(0), Backbone(Llama(CONFIG, jnp.float64), params))
    for dead in (False, True):
        tree = Tree.cartesian([2, 2])
        progress = decode(tree, heads, acceptance, 0, drafter=drafter, dead=dead)
        texts = texts_of(progress)
        for row in (0, 2):
            rule = request_of(acceptance, 0, dead).guides[row]
            assert allowed_everywhere(rule, texts[row])


def test_the_text_outgrows_the_cache():
    _, llama, backbone = random_model(CONFIG, 1)
    request = loop.Request([[1] * 100], [80], guides=[Rule(8)])
    engine = Engine(llama, planted(CONFIG), Tree.none())
    [text] = texts_of(loop.generate(engine, {"backbone": backbone, "heads": {}}, request))
    assert len(text) == 80 and allowed_everywhere(Rule(8), text)


def test_guesses_after_each_node():
    """Those of the scores that rank its children; of copied nodes those of their depth."""
    params, llama, backbone = random_model(CONFIG, 0)
    drafter = make_drafter(HeadsConfig(n_heads=2), CONFIG)
    heads = drafter.init(jax.random.key(0), Backbone(Llama(CONFIG, jnp.float64), params))
    tree = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [-1], [-1, -1]])
    engine = Engine(llama, drafter, tree, "sampled")
    variables = {"backbone": backbone, "heads": heads}
    request = loop.Request([[4], [5]], [9, 9], temperature=[1.0, 0.5])
    state, _ = loop.begin(engine, variables, request)
    ahead = look_ahead(engine, variables, state)
    nodes, guesses = np.asarray(ahead.drafts.nodes_BM), np.asarray(ahead.guesses_BMK)
    for node in range(1, tree.n_nodes):
        if tree.rank_M[node] >= 0:
            best = guesses[:, tree.parent_M[node], tree.rank_M[node]]
            assert best.tolist() == nodes[:, node].tolist()
    copied, deepest = tree.copied_C
    assert (guesses[:, copied] == guesses[:, 2]).all() and (guesses[:, 0] >= 0).all()
    assert (guesses[:, deepest] == NO_TOKEN).all()
