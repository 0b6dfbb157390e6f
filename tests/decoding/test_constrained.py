"""Constraints in the step: drafted text is plain constrained decoding's, whatever the constraint is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import (
    LIMITS,
    PROMPTS,
    SAMPLED,
    check_counts,
    planted,
    planted_params,
    random_model,
    texts_of,
)
from tiny import forward_logits, tiny_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.constrained import look_ahead
from medusa_jax.decoding.masks import NO_TOKEN, words
from medusa_jax.decoding.penalties import Asked
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.stopping import STOPPED, STUCK
from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
NEW, V, EOS = 40, 41, 7
CONFIG = tiny_arch(vocab_size=V, n_layers=1)
TREES = [
    Tree.none(),
    Tree.chain(3),
    Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
    Tree.from_choices([[0], [0, 0], [-1], [-1, -1], [-1] * 3], [[1], [0, 1], [0, 0, 0]]),
]


class Rule:
    """Which tokens may follow depends on the last two; now and then one alone may, or none."""

    def __init__(self, seed, dead=False, forcing=0.3):
        self.seed, self.dead, self.forcing = seed, dead, forcing
        self.text, self.consumed = [], 0
        self.first_W = np.zeros(words(V), np.uint32)
        self.fill(self.first_W)

    def tokens(self, text):
        """The tokens that may follow."""
        rng = np.random.default_rng([self.seed, *text[-2:], len(text) % 3])
        kind = rng.random()
        if self.dead and text and kind > 0.93:
            return []
        if kind < self.forcing:
            return [int(rng.integers(8, V))]
        found = rng.choice(V, 12, replace=False).tolist()
        return found if len(text) > 9 else [t for t in found if t != EOS] or [9]

    def bits(self, text, into_W):
        allowed = np.zeros(32 * words(V), np.uint8)
        allowed[self.tokens(text)] = 1
        into_W[:] = np.packbits(allowed, bitorder="little").view(np.uint32)
        return bool(into_W.any())

    def fill(self, into_W):
        return self.bits(self.text, into_W)

    def advance(self, tokens):
        self.text += tokens
        self.consumed += len(tokens)

    def replace_forbidden(self, nodes_M, children, guesses_MK):
        def visit(node, text):
            allowed = self.tokens(text)
            forced = allowed if len(allowed) == 1 else []
            for child in children[node]:
                if nodes_M[child] not in allowed:
                    there = set(nodes_M[children[node]].tolist())
                    others = (t for t in [*forced, *guesses_MK[node]] if t in allowed)
                    nodes_M[child] = next((t for t in others if t not in there), 0)
                visit(child, [*text, int(nodes_M[child])])

        visit(0, self.text)

    def fill_tree(self, nodes_M, children, into_MW):
        def visit(node, text):
            for child in children[node]:
                after = [*text, int(nodes_M[child])]
                if after[-1] in self.tokens(text):
                    if self.bits(after, into_MW[child]):
                        visit(child, after)
                    else:
                        there = self.tokens(text)
                        nodes_M[child] = next(t for t in range(V) if t not in there)

        visit(0, self.text)


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


@pytest.mark.parametrize("acceptance", ["sampled", *wide("greedy")])
def test_any_tree_gives_the_text_of_plain_decoding(acceptance):
    appended, ends = np.zeros(4, int), set()

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(st.sampled_from(TREES[1:]), st.integers(0, 5), st.booleans())
    def check(tree, seed, dead):
        penalties = [Asked(frequency=0.5)] * 3 if seed == 5 else None
        plain = decode(TREES[0], {}, acceptance, seed, dead=dead, penalties=penalties)
        expected = texts_of(plain)
        known = [p + t for p, t in zip(PROMPTS, expected)]
        heads = planted_params(known, V, seed)
        got = decode(tree, heads, acceptance, seed, dead=dead, penalties=penalties)
        assert texts_of(got) == expected
        assert got.status_B.tolist() == plain.status_B.tolist()
        check_counts(got)
        appended[:] += np.asarray(got.histogram_BL).sum(0)
        ends.update(got.status_B.tolist())

    check()
    assert (appended / appended.sum() > 0.04).all() and {STOPPED, STUCK} <= ends


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
