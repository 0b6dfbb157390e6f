"""The plain loop against the full forward pass; slots, batches, seeds and platforms change no text.

That any tree gives its text is in `test_any_tree.py`.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from planted import Planted, filtered_scores, planted, planted_params, texts_of
from planted import drafted as planted_text
from tiny import decoder, forward_logits, random_params, tiny_arch

from medusa_jax.decoding import generate as loop
from medusa_jax.decoding import sampling, step
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.sampling import Sampling, gumbel, row_keys
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.heads.drafter import Proposal
from medusa_jax.model import attention, grouped, kernels, seams, texts, tpu
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")

NEW = 40
# (vocabulary, rows, sliding window): one compilation each.
SHAPES = [(7, 3, 0), (60, 1, 0), (23, 3, 3)]
LIMITS = [NEW, 17, 29]


def config_of(shape):
    vocab, _, window = shape
    return tiny_arch(vocab_size=vocab, sliding_window=window, sliding_window_start_layer=1)


@cache
def model(shape, seed):
    config = config_of(shape)
    params = random_params(config, seed)
    return (params, *decoder(config, params))


def sampling_fields(rows, seed):
    """One greedy row among sampled ones, with and without filters."""
    return {
        "temperature": [1.0, 0.0, 0.6][:rows],
        "top_k": [0, 0, 5][:rows],
        "top_p": [1.0, 1.0, 0.9][:rows],
        "min_p": [0.02, 0.0, 0.0][:rows],
        "seed": [seed, seed + 1, seed][:rows],
    }


@cache
def reference(shape, seed, acceptance):
    """Prompts, and what the plain loop emits after them."""
    vocab, rows, _ = shape
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab, n).tolist() for n in rng.integers(1, 12, rows)]
    extra = sampling_fields(rows, seed) if acceptance == "sampled" else {}
    request = loop.Request(prompts, LIMITS[:rows], **extra)
    _, llama, backbone = model(shape, seed)
    drafter = planted(config_of(shape))
    plain = Engine(llama, drafter, Tree.none(), acceptance)
    return request, texts_of(
        loop.generate(plain, {"backbone": backbone, "heads": {}}, request)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_loop_is_the_argmax_of_the_full_forward_pass(shape):
    """The reference itself, against the pass that has neither cache nor tree."""
    for seed in range(2):
        params, *_ = model(shape, seed)
        request, texts = reference(shape, seed, "greedy")
        for prompt, text, limit in zip(request.prompts, texts, request.limits):
            assert len(text) == limit
            logits = forward_logits(config_of(shape), params, prompt + text)
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == text
            assert logits.std() > 1


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_sampled_plain_loop_is_the_argmax_of_perturbed_forward_logits(shape):
    """Row b's token at position t is argmax(filtered(logits / T) + g(seed, b, t))."""
    vocab, rows, _ = shape
    params, *_ = model(shape, 1)
    request, texts = reference(shape, 1, "sampled")
    fields = sampling_fields(rows, 1)
    for row, (prompt, text) in enumerate(zip(request.prompts, texts)):
        logits = forward_logits(config_of(shape), params, prompt + text)[None]
        one = {k: jnp.array(v[row : row + 1]) for k, v in fields.items()}
        key = row_keys(one["seed"].astype(jnp.uint32), jnp.array([row]))
        sampling = Sampling(
            one["temperature"], one["top_k"], one["top_p"], one["min_p"], key
        )
        scores = filtered_scores(logits, sampling)
        if fields["temperature"][row]:
            positions = jnp.arange(1, logits.shape[1] + 1)[None]
            scores = scores + gumbel(key, positions, vocab, scores.dtype)
        expected = np.asarray(scores)[0].argmax(-1)[len(prompt) - 1 : -1].tolist()
        assert text == expected


def drafted(shape, seed, request, known, tree, acceptance="sampled"):
    """Text of a request with a planted drafter that knows `known` continuations."""
    of_shape = config_of(shape), model(shape, seed)
    return planted_text(*of_shape, request, known, tree, seed, acceptance)


def picked(request, rows, **changes):
    """The same request with its rows in another order, keeping their ids."""
    columns = ("prompts", "limits", "temperature", "top_k", "top_p", "min_p", "seed")
    fields = {name: [getattr(request, name)[r] for r in rows] for name in columns}
    return loop.Request(**(fields | {"ids": list(rows)} | changes))


def test_a_row_does_not_depend_on_its_slot_or_its_batch_mates():
    shape, tree = SHAPES[0], Tree.cartesian([2, 2])
    request, expected = reference(shape, 3, "sampled")
    for order in ([2, 0, 1], [1, 2, 0], [0, 2, 2]):
        known = [expected[r] for r in order]
        got = texts_of(drafted(shape, 3, picked(request, order), known, tree))
        assert got == known
    for row in range(3):
        got = texts_of(drafted(shape, 3, picked(request, [row]), [expected[row]], tree))
        assert got == [expected[row]]
    # The id, not the slot, decides the draws: another id is another text.
    other = picked(request, [0], ids=[1])
    assert texts_of(drafted(shape, 3, other, [expected[0]], tree)) != [expected[0]]


@pytest.mark.parametrize(
    "platform, kernel, acceptance, vocab",
    [
        ("tpu", "tree", "sampled", 31),
        ("tpu", "own", "sampled", 33),
        ("cuda", "own", "sampled", 35),
        *wide(("tpu", "tree", "greedy", 29), ("cuda", "own", "greedy", 34)),
    ],
)
def test_the_forms_for_accelerators_give_the_same_text(
    monkeypatch, platform, kernel, acceptance, vocab
):
    """The attention kernel, interpreted; queries times keys; rotation by head; caches
    and tokens written row by row."""
    # A vocabulary that no other test has traced, ragged rows, a sliding window.
    shape = (vocab, 3, 3)
    tree = Tree.cartesian([2, 2, 1])
    request, expected = reference(shape, 1, acceptance)
    for module in (attention, grouped, texts, seams, sampling, step):
        monkeypatch.setattr(module, "platform", lambda: platform)
    calls = []

    def counted(run, **how):
        def call(q_BTNH, *args):
            calls.append(q_BTNH.shape[1])
            return run(q_BTNH, *args, **how)

        return call

    forms = {"own": None, "tree": counted(tpu.attend_tree, interpret=True)}
    monkeypatch.setattr(attention, "attend", counted(attention.attend))
    monkeypatch.setattr(kernels, "for_cache", lambda *args: forms[kernel])
    assert texts_of(drafted(shape, 1, request, expected, tree, acceptance)) == expected
    assert tree.n_nodes in calls
    if kernel == "tree":  # one row: a batch that the plain loop was not traced for
        fields = sampling_fields(1, 1) if acceptance == "sampled" else {}
        first = loop.Request(request.prompts[:1], request.limits[:1], **fields)
        plain = drafted(shape, 1, first, expected[:1], Tree.none(), acceptance)
        assert texts_of(plain) == expected[:1] and 1 in calls


def test_seeds_differ_and_repeat():
    shape, tree = SHAPES[1], Tree.chain(2)
    texts = []
    for seed in (5, 6, 5):
        request = loop.Request([[1, 2, 3]], [NEW], temperature=[1.0], seed=[seed])
        texts += texts_of(drafted(shape, 0, request, [[]], tree))
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(
    ("fields", "is_greedy"),
    [
        ({"temperature": [1e-4]}, True),
        ({"temperature": [1.0], "top_k": [1]}, True),
        ({"temperature": [1.0], "top_p": [1e-6]}, True),
        ({"temperature": [1.0], "min_p": [1.0]}, True),
        ({"temperature": [100.0]}, False),
    ],
)
def test_extreme_parameters(fields, is_greedy):
    """Where one token is left, sampling is greedy; where all are alike, drafts still fit."""
    shape, tree = SHAPES[1], Tree.chain(2)
    greedy, [greedy_text] = reference(shape, 1, "greedy")
    _, llama, backbone = model(shape, 1)
    request = loop.Request(greedy.prompts, [NEW], seed=[3], **fields)
    plain = Engine(llama, planted(config_of(shape)), Tree.none(), "sampled")
    [expected] = texts_of(
        loop.generate(plain, {"backbone": backbone, "heads": {}}, request)
    )
    progress = drafted(shape, 1, request, [expected], tree)
    assert texts_of(progress) == [expected]
    assert (np.asarray(progress.histogram_BL).sum(0)[1:] > 0).all()  # drafts were accepted
    assert (expected == greedy_text) == is_greedy
    if not is_greedy:
        assert len(set(expected)) > NEW // 3


def test_finished_rows_stay_as_they_are():
    """A row that ends early keeps its text and counters while its mates go on."""
    shape, tree = SHAPES[0], Tree.cartesian([2, 1])
    request, expected = reference(shape, 2, "greedy")
    _, llama, backbone = model(shape, 2)
    engine = Engine(llama, planted(config_of(shape)), tree)
    known = [p + t for p, t in zip(request.prompts, expected)]
    variables = {"backbone": backbone, "heads": planted_params(known, shape[0], 0)}
    seen = {}
    for progress in loop.stream(engine, variables, request, chunk_steps=1):
        for row in np.flatnonzero(np.asarray(progress.status_B) != RUNNING):
            now = jax.tree.map(lambda x, row=row: np.asarray(x)[row], progress)
            now = now.replace(tokens_BO=now.tokens_BO[: now.n_new_B], depth_BO=0)
            first = seen.setdefault(row, now)
            jax.tree.map(np.testing.assert_array_equal, first, now)
    assert sorted(seen) == [0, 1, 2]


def test_float32_differs_only_at_ties():
    """In float32, passes over 1 and M tokens round differently; texts may part only at a tie.

    `test_api.py` checks the gap that `--compare` reports; here the rate is what matters.
    """
    config = config_of(SHAPES[1])
    tree = Tree.cartesian([2, 2])
    parted = 0
    for seed in range(4):
        params = random_params(config, seed)
        llama, backbone = decoder(config, params, jnp.float32)
        request = loop.Request([[1, 2, 3]], [NEW])
        plain = Engine(llama, planted(config), Tree.none())
        [expected] = texts_of(
            loop.generate(plain, {"backbone": backbone, "heads": {}}, request)
        )
        heads = planted_params([[1, 2, 3, *expected]], config.vocab_size, seed)
        engine = Engine(llama, planted(config), tree)
        [got] = texts_of(
            loop.generate(engine, {"backbone": backbone, "heads": heads}, request)
        )
        if got == expected:
            continue
        parted += 1
        first = next(i for i, (a, b) in enumerate(zip(got, expected)) if a != b)
        text = [1, 2, 3, *expected[:first]]
        scores = np.sort(forward_logits(config, params, text)[-1])
        assert_close(scores[-2], scores[-1], dtype="float32")
    assert parted <= 1


@dataclasses.dataclass(frozen=True)
class Noting(Planted):
    """A planted drafter that also notes what each row's last committed position brought."""

    def start(self, batch, slots, dtype):
        hidden = jnp.zeros((batch, self.llama.d_model), dtype)
        none = jnp.zeros((batch,), jnp.int32)
        return super().start(batch, slots, dtype), hidden, none, none

    def commit(self, params, backbone, state, new):
        position, *noted = state
        position = super().commit(params, backbone, position, new)
        rows, last = jnp.arange(new.n_B.shape[0]), jnp.maximum(new.n_B - 1, 0)
        hidden_BD = new.hidden_BTE[rows, last]
        tokens = (x[rows, last] for x in (new.tokens_BT, new.next_tokens_BT))
        kept = [
            jnp.where((new.n_B > 0).reshape(-1, *[1] * (x.ndim - 1)), x, old)
            for x, old in zip((hidden_BD, *(t.astype(jnp.int32) for t in tokens)), noted)
        ]
        return position, *kept

    def propose(self, params, backbone, state, request):
        return super().propose(params, backbone, state[0], request)


def test_the_drafter_is_given_the_accepted_positions():
    """Step by step: hidden state and token of the position before the root, and the root itself."""
    shape, tree = (
        SHAPES[0],
        Tree.from_choices([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]]),
    )
    config = config_of(shape)
    request, expected = reference(shape, 1, "greedy")
    params, llama, backbone = model(shape, 1)
    known = [p + t for p, t in zip(request.prompts, expected)]
    engine = Engine(llama, Noting(planted(config).heads, config), tree)
    variables = {"backbone": backbone, "heads": planted_params(known, shape[0], 2)}
    tokens = np.zeros((3, 64), np.int32)
    for row, text in enumerate(known):
        tokens[row, : len(text)] = text
    positions = np.broadcast_to(np.arange(64)[None], tokens.shape)
    forward = jax.jit(partial(Llama(config, jnp.float64).apply, method="forward"))
    hidden = np.asarray(
        forward({"params": params}, tokens, positions, np.ones_like(tokens))
    )
    state, _ = loop.begin(engine, variables, request)
    for _ in range(8):
        at, noted, token, root = (np.asarray(x) for x in state.drafter)
        running = np.flatnonzero(np.asarray(state.status_B) == RUNNING)
        assert running.size
        for row in running:
            assert at[row] == state.length_B[row]
            assert token[row] == known[row][at[row] - 1]
            assert root[row] == known[row][at[row]] == state.root_B[row]
            assert_close(noted[row], hidden[row, at[row] - 1])
        state, _ = decode_loop(engine, variables, state, np.int32(1))


@dataclasses.dataclass(frozen=True)
class Noise(Planted):
    """Drafts by the noise alone, as if its logits were flat."""

    def propose(self, params, backbone, state, request):
        root_B, tree, rank = request
        flat = jnp.zeros((root_B.shape[0], self.llama.vocab_size), backbone.llama.dtype)
        drafts = [jnp.argmax(rank(d + 1, flat).scores, -1) for d in range(tree.depth)]
        return Proposal(jnp.stack([root_B, *drafts], axis=1))


def test_drafts_are_ranked_by_the_noise_of_their_own_positions():
    """With a flat verifier the noise decides every token, and so every draft is right."""
    config = config_of(SHAPES[0])
    params = random_params(config, 0)
    params["lm_head"]["kernel"][:] = 0
    llama, backbone = decoder(config, params)
    engine = Engine(llama, Noise(planted(config).heads, config), Tree.chain(3), "sampled")
    request = loop.Request([[1, 2], [3]], [21, 21], temperature=[0.7, 2.0])
    progress = loop.generate(engine, {"backbone": backbone, "heads": {}}, request)
    assert np.asarray(progress.histogram_BL).tolist() == [[0, 0, 0, 5]] * 2
