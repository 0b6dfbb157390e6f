"""The promise: drafted text is plain decoding's, token for token, whatever changes that text.

The plain loop is tested against the full forward pass and the definition of every option, any tree
against the plain loop. All in float64, where the promise holds without exception. The planted drafter
makes every accepted length frequent, so these tests see every path through accept, commit and append.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, wide
from closeness import assert_close
from guides import EOS, Rule, V, barred_tokens, penalised
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import (
    LIMITS,
    PROMPTS,
    SAMPLED,
    decoded,
    drafted,
    filtered_scores,
    fresh_medusa,
    plain_texts,
    random_model,
    sampling_of,
    texts_of,
)
from tiny import decoder, forward_logits, random_params, tiny_arch
from trees import trees

from medusa_jax.config import LlamaConfig
from medusa_jax.decoding.penalties import PenaltyOptions
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.sampling import gumbel, row_keys
from medusa_jax.decoding.stopping import LIMIT, STOPPED, STUCK
from medusa_jax.kernels import tpu, tpu_operations
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.kernels.cuda import CudaKernels
from medusa_jax.kernels.tpu import TpuKernels
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
# One row for each kind of option; the second has none.
ASKED = [
    PenaltyOptions(presence=0.7, frequency=0.4, bias=((3, 2.0), (5, -100.0))),
    PenaltyOptions(),
    PenaltyOptions(repetition=4.0, frequency=-0.2, least=9, ends=(2, 8)),
]


def constrained(seed):
    """Rules for the first and the last row; some leave no token at all."""
    dead = bool(seed % 2)
    guides = [Rule(seed, dead), None, Rule(seed + 1, dead)]
    return {"guides": guides, "ends": [(EOS,)] * 3}


@dataclass(frozen=True)
class Mechanism:
    """What changes the text: fields of the engine, and of a request by the seed."""

    config: LlamaConfig
    engine: dict = field(default_factory=dict)
    fields: Callable = lambda seed: {}
    static: tuple[Tree, ...] = ()
    ends: frozenset = frozenset([LIMIT])

    def request(self, acceptance, seed):
        """A new one: a guide is used once."""
        sampled = SAMPLED | {"seed": [seed, seed + 1, seed]}
        drawn = {} if acceptance == "greedy" else sampled
        return DecodeRequest(PROMPTS, LIMITS, **drawn, **self.fields(seed))

    def scores(self, request, row, logits_TV, text):
        """What each token of a row's text is the best of [T, V], by the definitions of its options."""
        prompt, scores = request.prompts[row], np.array(logits_TV)
        rule = (request.guides or [None] * 3)[row]
        n = self.engine.get("no_repeat_ngram_size")
        for t, z in enumerate(scores):
            if n and not rule:  # a grammar often requires repeated tokens
                z[barred_tokens([*prompt, *text[:t]], n, len(z))] = -np.inf
            if request.penalties:
                z[:] = penalised(z, prompt, text[:t], request.penalties[row])
            if rule:
                z[np.setdiff1d(np.arange(len(z)), rule.tokens(text[:t]))] = -np.inf
        return scores


FEW = tiny_arch(vocab_size=11, n_layers=1)
WINDOW = tiny_arch(vocab_size=23, sliding_window=3, window_layers=(False, True))
RULED = tiny_arch(vocab_size=V, n_layers=1)
ENDS = frozenset([LIMIT, STOPPED, STUCK])
MECHANISMS = {
    "none": Mechanism(tiny_arch(vocab_size=7)),
    "window": Mechanism(WINDOW),
    "n-gram": Mechanism(FEW, {"no_repeat_ngram_size": 3}),
    "penalties": Mechanism(FEW, {}, lambda seed: {"penalties": ASKED}),
    "constraint": Mechanism(RULED, {}, constrained, tuple(STATIC), ENDS),
    "copies": Mechanism(tiny_arch(vocab_size=7, n_layers=1), {}, static=tuple(COPYING)),
    "all": Mechanism(
        RULED,
        {"no_repeat_ngram_size": 3},
        lambda seed: constrained(seed) | {"penalties": ASKED},
        tuple(STATIC),
        ENDS,
    ),
}
# The default run takes all options that change the text together; the wide run takes each alone, too.
CASES = pytest.mark.parametrize(
    ("name", "acceptance"),
    thinned(product(MECHANISMS, ("greedy", "sampled")), ("all", "sampled")),
)


@CASES
def test_the_plain_loop_takes_the_best_token_of_the_full_pass(
    name, acceptance, monkeypatch
):
    """If sampled, row b's token at position t is argmax(filtered(scores / T) + g(seed, b, t)).

    The cache doubles on the way.
    """
    monkeypatch.setattr(CpuKernels, "least_slots", 32)
    m, changed = MECHANISMS[name], 0
    for seed in range(2):
        params, *_ = model = random_model(m.config, seed)
        request = m.request(acceptance, seed)
        found = plain_texts(m.config, model, request, acceptance, **m.engine)
        for row, (prompt, text) in enumerate(zip(PROMPTS, found)):
            rule = (request.guides or [None] * 3)[row]
            stuck = rule and not rule.tokens(text)
            assert len(text) == LIMITS[row] or stuck or (request.ends and text[-1] == EOS)
            logits = forward_logits(m.config, params, prompt + text)[len(prompt) - 1 : -1]
            assert logits.std() > 1
            scores = m.scores(request, row, logits, text)
            changed += (scores.argmax(-1) != logits.argmax(-1)).sum()
            if acceptance == "sampled":
                one = {key: values[row] for key, values in SAMPLED.items()}
                key = row_keys(np.uint32([request.seed[row]]), np.int32([row]))
                scores = filtered_scores(scores[None], sampling_of(1, **one))[0]
                if one["temperature"]:
                    at = len(prompt) + np.arange(len(text))[None]
                    scores += gumbel(key, at, m.config.vocab_size, jnp.float64)[0]
            assert scores.argmax(-1).tolist() == text
    assert (changed > 10) == (name not in ("none", "window", "copies"))


@CASES
def test_any_tree_gives_the_text_of_plain_decoding(name, acceptance):
    m = MECHANISMS[name]
    lengths, ends, zeros = np.zeros(DEPTH + 1, int), set(), 0

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.sampled_from(m.static) if m.static else trees(M, DEPTH), st.integers(0, 4))
    def check(tree, seed):
        nonlocal zeros
        model, request = random_model(m.config, seed % 3), m.request(acceptance, seed)
        expected = plain_texts(m.config, model, request, acceptance, **m.engine)
        example = None if m.static else EXAMPLE
        progress = drafted(
            m.config, model, m.request(acceptance, seed), expected, tree,
            seed + tree.n_nodes, acceptance, example, **m.engine,
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


@pytest.mark.parametrize("acceptance", wide("rejection", "typical"))
def test_rules_whose_text_is_another_obey_the_options(acceptance):
    m = MECHANISMS["all"]
    for seed in range(2):
        given = m.config, Tree.cartesian([2, 2]), acceptance, seed
        engine, variables = fresh_medusa(*given, **m.engine)
        request = m.request(acceptance, seed)
        for row, text in enumerate(texts_of(decoded(engine, variables, request))):
            flat = np.zeros((len(text), m.config.vocab_size))
            scores = m.scores(request, row, flat, text)
            assert (scores[np.arange(len(text)), text] > -50).all()  # a bias of -100 bars


OWN_ATTENTION = TpuKernels(attention=False)


@pytest.mark.wide
@pytest.mark.parametrize(
    "kernels, acceptance, vocab",
    [
        (TpuKernels(), "sampled", 31),
        (CudaKernels(), "sampled", 35),
        *wide((TpuKernels(), "greedy", 29), (CudaKernels(), "greedy", 34)),
        *wide((OWN_ATTENTION, "sampled", 33)),
    ],
)
def test_the_forms_for_accelerators_give_the_same_text(
    monkeypatch, kernels, acceptance, vocab
):
    """The attention kernel, interpreted; queries times keys; rotation by head; caches
    and tokens written row by row."""
    # A vocabulary that no other test has traced, ragged rows, a sliding window.
    window = {"sliding_window": 3, "window_layers": (False, True)}
    m = Mechanism(tiny_arch(vocab_size=vocab, **window))
    stored, llama, prepared = random_model(m.config, 1)
    tree, request = Tree.cartesian([2, 2, 1]), m.request(acceptance, 1)
    expected = plain_texts(m.config, (stored, llama, prepared), request, acceptance)
    calls, run = [], tpu_operations.attend_tree

    def interpreted(q_BTNH, *args):
        calls.append(q_BTNH.shape[1])
        return run(q_BTNH, *args, interpret=True)

    monkeypatch.setattr(tpu_operations, "attend_tree", interpreted)
    monkeypatch.setattr(tpu, "kernel_takes", lambda *args: True)
    model = stored, llama.clone(kernels=kernels), prepared
    given = m.config, model, request, expected
    assert texts_of(drafted(*given, tree, 1, acceptance)) == expected
    assert (tree.n_nodes in calls) == (kernels == TpuKernels())
    assert plain_texts(m.config, model, request, acceptance) == expected
    assert (1 in calls) == (kernels == TpuKernels())


@pytest.mark.parametrize("acceptance", ["sampled", *wide("rejection")])
def test_a_row_does_not_depend_on_its_slot_or_its_batch_mates(acceptance):
    m = MECHANISMS["penalties"]
    engine, variables = fresh_medusa(m.config, Tree.cartesian([2, 2]), acceptance)
    rows = {name: x for name, x in vars(m.request(acceptance, 3)).items() if x}

    def texts(order, ids=None):
        picked = {name: [column[row] for row in order] for name, column in rows.items()}
        request = DecodeRequest(**picked, ids=list(ids or order))
        return texts_of(decoded(engine, variables, request))

    together = texts([0, 1, 2])
    for order in ([2, 0, 1], [1, 1, 2]):
        assert texts(order) == [together[row] for row in order]
    for row in range(3):
        assert texts([row]) == [together[row]]
    # The id, not the slot, decides the draws: another id is another text.
    assert texts([0], ids=[1]) != [together[0]]


def test_float32_differs_only_at_ties():
    """In float32, passes over 1 and M tokens round differently; texts may part only at a tie.

    `test_api.py` checks the gap that `--compare` reports; here the rate is what matters.
    """
    config, prompt, parted = tiny_arch(vocab_size=60), [1, 2, 3], 0
    for seed in range(4):
        params, request = random_params(config, seed), DecodeRequest([prompt], [40])
        model = params, *decoder(config, params, jnp.float32)
        [expected] = plain_texts(config, model, request)
        progress = drafted(config, model, request, [expected], Tree.cartesian([2, 2]), seed)
        [got] = texts_of(progress)
        if got != expected:
            parted += 1
            first = next(i for i, (a, b) in enumerate(zip(got, expected)) if a != b)
            scores = np.sort(forward_logits(config, params, prompt + expected[:first])[-1])
            assert_close(scores[-2], scores[-1], dtype="float32")
    assert parted <= 1
