"""The promise: any tree gives the text of plain decoding, whatever changes that text.

All in float64, where it holds without exception. The planted drafter makes every accepted length
frequent, so these tests see every path through accept, commit and append.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from cases import thinned
from guides import EOS, Rule, V
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import LIMITS, PROMPTS, SAMPLED, drafted, plain_texts, random_model, texts_of
from tiny import tiny_arch
from trees import trees

from medusa_jax.config import LlamaConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.penalties import Asked
from medusa_jax.decoding.stopping import LIMIT, STOPPED, STUCK
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")

M, DEPTH = 9, 4
# A tree of these sizes: random trees are traced in its place.
EXAMPLE = Tree.from_choices([*([0] * d for d in range(1, 5)), *([r] for r in range(1, 5))])
# The host walks a constrained row's tree, and copied nodes are constants: trees are static there.
COPYING = [
    Tree.from_choices([[0], [1], [0, 0], [-1], [-1, -1], [-1] * 3], spares)
    for spares in ([], [[2], [0, 1], [3]])
]
STATIC = [
    Tree.chain(3),
    Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
    COPYING[1],
]
# Rows of all kinds, the second of which asks for nothing.
ASKED = [
    Asked(presence=0.7, frequency=0.4, bias=((3, 2.0), (5, -100.0))),
    Asked(),
    Asked(repetition=4.0, frequency=-0.2),
]


def guided(seed):
    """Rules for the first and the last row; some leave no token at all."""
    dead = bool(seed % 2)
    guides = [Rule(seed, dead), None, Rule(seed + 1, dead)]
    return {"guides": guides, "stops": [((EOS,),)] * 3}


@dataclass(frozen=True)
class Mechanism:
    """What changes the text: fields of the engine, and of a request by the seed."""

    config: LlamaConfig
    engine: dict = field(default_factory=dict)
    request: Callable = lambda seed: {}
    static: tuple[Tree, ...] = ()
    ends: frozenset = frozenset([LIMIT])


FEW = tiny_arch(vocab_size=11, n_layers=1)
WINDOW = tiny_arch(vocab_size=23, sliding_window=3, sliding_window_start_layer=1)
RULED = tiny_arch(vocab_size=V, n_layers=1)
ENDS = frozenset([LIMIT, STOPPED, STUCK])
MECHANISMS = {
    "none": Mechanism(tiny_arch(vocab_size=7)),
    "window": Mechanism(WINDOW),
    "n-gram": Mechanism(FEW, {"no_repeat_ngram_size": 3}),
    "penalties": Mechanism(FEW, {}, lambda seed: {"penalties": ASKED}),
    "constraint": Mechanism(RULED, {}, guided, tuple(STATIC), ENDS),
    "copies": Mechanism(tiny_arch(vocab_size=7, n_layers=1), {}, static=tuple(COPYING)),
    "all": Mechanism(
        RULED,
        {"no_repeat_ngram_size": 3},
        lambda seed: guided(seed) | {"penalties": ASKED},
        tuple(STATIC),
        ENDS,
    ),
}


@pytest.mark.parametrize(
    ("name", "acceptance"),
    thinned(
        [(name, rule) for name in MECHANISMS for rule in ("greedy", "sampled")],
        ("window", "greedy"),
        *((name, "sampled") for name in MECHANISMS if name != "window"),
    ),
)
def test_any_tree_gives_the_text_of_plain_decoding(name, acceptance):
    m = MECHANISMS[name]
    lengths, ends, zeros = np.zeros(DEPTH + 1, int), set(), 0

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.sampled_from(m.static) if m.static else trees(M, DEPTH), st.integers(0, 4))
    def check(tree, seed):
        nonlocal zeros
        model = random_model(m.config, seed % 3)

        def request():  # a guide is used once
            fields = SAMPLED | {"seed": [seed] * 3} if acceptance == "sampled" else {}
            return loop.Request(PROMPTS, LIMITS, **fields, **m.request(seed))

        expected = plain_texts(m.config, *model[1:], request(), acceptance, **m.engine)
        example = None if m.static else EXAMPLE
        progress = drafted(
            m.config, model, request(), expected, tree, seed + tree.n_nodes,
            acceptance, example, **m.engine,
        )  # fmt: skip
        assert texts_of(progress) == expected
        histogram = np.asarray(progress.histogram_BL).sum(0)
        lengths[: len(histogram)] += histogram
        ends.update(np.asarray(progress.status_B).tolist())
        zeros += sum(text.count(0) for text in expected)

    check()
    deep = lengths[: DEPTH if m.static else DEPTH + 1]
    # Of the copying trees only the copied chain is three deep.
    assert (deep / deep.sum() > 0.02).all()
    assert ends >= m.ends and zeros > 0  # token 0 is an ordinary one
