"""What every registered drafter promises the decode loop, the trainer and the calibrator.

A new drafter is tested here by being registered, and one from outside the package alone by
`pytest tests/heads/test_contract.py --drafter module:Class`; its own equations are tested in its own file.
"""

import dataclasses
import os
from functools import cache, partial
from itertools import product

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from planted import check_counts, decoded, random_model, streamed, texts_of
from planted import plain_texts as plainly
from tiny import decoder, tiny_arch
from trees import WILD

from medusa_jax import model
from medusa_jax.decoding import generation
from medusa_jax.decoding import prefill as reading
from medusa_jax.decoding.acceptance import rejection
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.request import DecodeRequest, prompt_arrays
from medusa_jax.decoding.sampling import row_keys
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.tree_size.gate import Gate
from medusa_jax.errors import UserError
from medusa_jax.evaluate import ranks as recording_ranks
from medusa_jax.files.layouts import heads_io, native_heads
from medusa_jax.heads.drafter import Committed, Ranked, TextRows
from medusa_jax.heads.names import BASELINES, DRAFTERS
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.heads.state import grow_state, rewind_state
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import make_mesh
from medusa_jax.training.losses.lm_heads import HeadReads
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
CHOSEN = os.environ.get("MEDUSA_JAX_TEST_DRAFTER")
OURS = [*sorted(DRAFTERS), *sorted(BASELINES), "examples.tiny_drafter:Tiny"]
ALL = [CHOSEN] if CHOSEN else OURS
NAMES = [name for name in ALL if drafter_class(name).trained]
RULES = ("greedy", "sampled")


def some(cases, *kept):
    """All cases of a drafter that was chosen; else `thinned` ones."""
    return list(cases) if CHOSEN else thinned(cases, *kept)


# Every drafter by one of the rules; Amphista-alpha runs nothing that Amphista does not.
ONCE = [(name, RULES[i % 2]) for i, name in enumerate(ALL) if name != "amphista_alpha"]


@cache
def noisy(name, lm_head="low_rank"):
    backbone = family.stored_base()
    if name not in NAMES:
        config = backbone.llama.config
        prepared = Backbone(*decoder(config, backbone.params))
        return prepared, *family.baseline_of(name, config)
    heads = family.small_heads(name, lm_head=lm_head)
    return backbone, *family.drafter_of(heads, backbone)


@pytest.mark.parametrize("name", some(NAMES, "amphista"))
def test_decoding_reads_the_features_that_training_gave(name):
    """Ragged commits, some empty, some after others: head by head the same logits, where there was
    room at first and where the state had to grow."""
    backbone, drafter, params = noisy(name)
    K, B, T, E = 4, 3, 16, family.width(drafter)
    rng = np.random.default_rng(1)
    rows = hidden, tokens, *_ = family.random_rows(rng, B, T, E)
    features, expected = family.features_and_logits(drafter, params, backbone, rows)
    assert features.shape[:3] == (K, B, T)
    propose = family.proposed_logits(drafter, backbone, Tree.chain(K))
    commit = jax.jit(lambda state, new: drafter.commit(params, backbone, state, new))
    state, length = drafter.start(B, 9, jnp.float64), np.zeros(B, int)
    for width, n in ((8, [5, 3, 1]), (4, [2, 0, 4]), (4, [1, 4, 0])):
        at = length[:, None] + np.arange(width)[None]
        real = np.arange(width)[None] < np.array(n)[:, None]
        row = np.arange(B)[:, None]
        new = rng.standard_normal((B, width, E))  # beyond n: noise
        new = np.where(real[..., None], hidden[row, np.minimum(at, T - 1)], new)
        here, following = (
            np.where(real, tokens[row, np.minimum(at + ahead, T - 1)], 7)
            for ahead in (0, 1)
        )
        state = commit(state, Committed(new, here, following, at, np.array(n, np.int32)))
        length += n
        last = length - 1
        follow = tokens[row, last[:, None] + 2 + np.arange(K)[None]]
        nodes, logits = propose(params, state, tokens[np.arange(B), last + 1], follow)
        np.testing.assert_array_equal(nodes[:, 1:], follow)
        for k in range(K):
            got = logits[k].reshape(B, -1)
            assert_close(got, expected[k][np.arange(B), last])
        state = grow_state(state, 16)


@pytest.mark.parametrize("name", some(ALL, "amphista", "draft_model", "eagle3"))
def test_a_state_goes_on_from_an_earlier_position(name):
    """Of a text that parts from the first after 3 and 5 positions, only the rest is read."""
    backbone, drafter, params = noisy(name)
    rng = np.random.default_rng(5)
    first, tokens, positions, _ = family.random_rows(rng, 2, 16, family.width(drafter))
    parted = np.array([3, 5], np.int32)
    after = positions >= parted[:, None]
    second = np.where(after[..., None], rng.standard_normal(first.shape), first)
    # A position is read with the token after it, so the last shared one changes with that.
    followed = np.where(positions > parted[:, None], (tokens + 5) % family.V, tokens)
    commit = jax.jit(lambda state, new: drafter.commit(params, backbone, state, new))

    def taken(state, hidden, tokens, begin, n):
        at = begin[:, None] + np.arange(10)[None]
        row = np.arange(2)[:, None]
        new = (hidden[row, at], tokens[row, at], tokens[row, at + 1], at, n)
        return commit(state, Committed(*new))

    start, zero = drafter.start(2, 64, jnp.float64), np.zeros(2, np.int32)
    whole = taken(start, first, tokens, zero, zero + 8)
    again = rewind_state(whole, parted)
    again = taken(again, second, followed, parted, zero + 4)
    fresh = taken(start, second, followed, zero, parted + 4)
    assert_close(*(visible(state, 64, parted + 4) for state in (again, fresh)))


def visible(state, slots, length_B):
    """Of caches, and of a drafter's text, the slots that count."""

    def seen(x):
        axis = {4: 2, 2: 1}.get(np.ndim(x))
        if axis is None or x.shape[axis] < slots:
            return np.asarray(x)
        seen_BS = np.arange(x.shape[axis])[None, :] < length_B[:, None]
        return np.where(seen_BS[:, None, :, None] if axis == 2 else seen_BS, x, 0)

    return jax.tree.map(seen, state)


@pytest.mark.parametrize("name", some(NAMES, "amphista"))
def test_texts_packed_into_a_row_do_not_see_each_other(name):
    backbone, drafter, params = noisy(name)
    rng, E = np.random.default_rng(2), family.width(drafter)
    hidden, tokens, positions, segments = family.random_rows(rng, 1, 14, E)
    packed_segments = np.array([[1] * 6 + [2] * 8], np.int32)
    packed_positions = np.array([[*range(6), *range(8)]], np.int32)
    features = jax.jit(lambda *rows: drafter.features(params, backbone, TextRows(*rows)))
    packed = features(hidden, tokens, packed_positions, packed_segments)
    alone = features(hidden[:, 6:], tokens[:, 6:], positions[:, :8], segments[:, :8])
    for k in range(4):  # as far as tokens up to t + k + 1 are there
        end = 8 - k - 1
        assert_close(packed[k, :, 6 : 6 + end], alone[k, :, :end])


@pytest.mark.parametrize("name", NAMES)
def test_logits_read_only_the_parameters_that_the_drafter_names(name):
    """The loss passes, and differentiates, only these."""
    backbone, drafter, params = noisy(name)
    rng = np.random.default_rng(7)
    rows = TextRows(*family.random_rows(rng, E=family.width(drafter)))
    shapes = jax.eval_shape(lambda: drafter.features(params, backbone, rows))
    for k, shape in enumerate(shapes.shape[1:] for _ in range(drafter.n_heads)):
        x = rng.standard_normal(shape)
        reads = HeadReads.of_head(drafter, params, backbone, k)
        assert jax.tree.leaves(reads.heads)
        small = reads.as_backbone(backbone.llama)
        logits = drafter.head_logits(reads.heads, small, k, x)
        assert_close(logits, drafter.head_logits(params, backbone, k, x))


@pytest.mark.parametrize("name", some(NAMES, "hydra", "medusa"))
def test_heads_deeper_than_the_tree_are_not_read(name):
    """What a separable drafter of fewer heads proposes is what the whole one does."""
    backbone, drafter, params = noisy(name)
    if not drafter.separable:
        pytest.skip("its heads need each other")
    rows = family.random_rows(np.random.default_rng(4), E=family.width(drafter))
    few = make_drafter(dataclasses.replace(drafter.heads, n_heads=2), backbone.llama.config)
    less = {k: v for k, v in params.items() if k not in ("heads_2", "heads_3")}
    tree, root = Tree.cartesian([3, 2]), np.array([1, 2], np.int32)
    nodes = []
    for d, p in ((drafter, params), (few, less)):
        state = family.committed(d, backbone, p, rows, [4, 6])
        nodes.append(family.proposed_logits(d, backbone, tree)(p, state, root)[0])
    np.testing.assert_array_equal(*nodes)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_strict(name, tmp_path):
    """A round trip, a key too few, a layer too many; fewer heads where heads can be parted."""
    from safetensors.numpy import load_file, save_file

    backbone, drafter, params = noisy(name, "shared")
    params = jax.tree.map(np.float32, params)
    config, path = backbone.llama.config, str(tmp_path)
    record = {"d_model": 16, "vocab_size": 23, "fingerprint": "x"}
    native_heads.save_heads(path, drafter.heads, params, base=record, recipe={})
    heads, loaded, _ = heads_io.load_heads(path, config, make_mesh())
    assert heads == drafter.heads
    jax.tree.map(np.testing.assert_array_equal, params, loaded)
    fewer, loaded, _ = heads_io.load_heads(path, config, make_mesh(), n_heads=2)
    assert fewer.n_heads == (2 if drafter.separable else 4)
    assert ("heads_3" in loaded) == (not drafter.separable and "heads_3" in params)
    file = tmp_path / "heads.safetensors"
    state = load_file(file)
    for key in sorted(state)[:: max(1, len(state) // 3)]:
        save_file({k: v for k, v in state.items() if k != key}, file)
        with pytest.raises(UserError, match=key):
            heads_io.load_heads(path, config, make_mesh())
    save_file(state | {"heads_0/layers_7/kernel": np.zeros((2, 2), np.float32)}, file)
    with pytest.raises(UserError, match="layers_7"):
        heads_io.load_heads(path, config, make_mesh())


# The engine's promise, in float64, with heads that are right by chance: among seven tokens a
# wide tree often holds the true one.

WIDE = Tree.from_choices(
    {*WILD.choices} | {(r,) for r in range(6)}
    | {(r, s) for r in range(6) for s in (0, 2, 5)} | {(r, 0, 1) for r in range(6)}
)  # fmt: skip
PROMPTS, LIMITS = [[1, 2, 3, 1, 2], [5], [0, 0, 6]], [30, 17, 24]


def seven(tied=False):
    """A backbone of seven tokens, as stored and as it decodes."""
    config = tiny_arch(vocab_size=7, n_layers=1, tie_embeddings=tied)
    return config, *random_model(config, 1)


def request_of(acceptance):
    drawn = {"temperature": [1.0, 0.0, 0.7], "top_p": [1.0, 1.0, 0.9], "seed": [1, 2, 1]}
    return DecodeRequest(PROMPTS, LIMITS, **({} if acceptance == "greedy" else drawn))


@cache
def plain_texts(acceptance, tied=False, n_gram=0):
    config, *model = seven(tied)
    request = request_of(acceptance)
    return plainly(config, model, request, acceptance, no_repeat_ngram_size=n_gram)


@cache
def engine_of(name, acceptance):
    config, params, llama, backbone = seven()
    if name not in NAMES:
        drafter, heads = family.baseline_of(name, config)
    else:
        stored = Backbone(Llama(config, jnp.float64), params)
        drafter, heads = family.drafter_of(family.small_heads(name), stored, seed=3)
    variables = {"backbone": backbone, "heads": heads}
    tree = drafter.default_tree if name == "prompt_lookup" else WIDE
    return Engine(llama, drafter, tree, acceptance), variables


@pytest.mark.parametrize("name, acceptance", some(product(ALL, RULES), *ONCE))
def test_any_drafter_gives_the_autoregressive_text(name, acceptance):
    engine, variables = engine_of(name, acceptance)
    request = request_of(acceptance)
    progress = decoded(engine, variables, request)
    assert texts_of(progress) == plain_texts(acceptance)
    check_counts(progress)
    lengths = np.asarray(progress.histogram_BL).sum(0)
    if name not in NAMES:  # of a repeated text as far as the chain goes, not by chance
        assert lengths[0] > 0 and lengths[1:].sum() > 0
    elif name in DRAFTERS:  # another package's random heads may never be right by chance
        assert (lengths[:3] > 0).all()
    *_, last = streamed(engine, variables, request, 3)
    assert texts_of(last) == plain_texts(acceptance)


def prefilled(engine, variables, monkeypatch, piece):
    """The state after ragged prompts, read in pieces of this many tokens."""
    slots, length = 80, np.array([20, 8, 1, 17])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 7, n).tolist() for n in length]
    request = DecodeRequest(prompts, [30] * 4, temperature=[1.0] * 4)
    _, arrays = prompt_arrays(engine, request)
    prompt_BT = arrays.prompt_BT
    after_BT = np.arange(prompt_BT.shape[1]) >= length[:, None]
    prompt_BT = np.where(after_BT, rng.integers(0, 7, prompt_BT.shape), prompt_BT)
    monkeypatch.setattr(reading, "PIECE", piece)
    read = jax.jit(partial(reading.prefill.__wrapped__, engine, slots))
    state = read(variables, arrays._replace(prompt_BT=prompt_BT.astype(np.int32)))
    first = {
        name: jax.tree.map(lambda x: x[:, :1], getattr(state, name))
        for name in ("tokens_BO", "logprobs")
    }
    return visible(state.replace(sampling=None, **first), slots, length)


PIECES = some(
    [*((name, 0) for name in ALL), *(("medusa", 5) for name in NAMES if name == "medusa")],
    ("medusa", 5),
)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name, window", PIECES)
def test_prompts_read_in_pieces_are_prompts_read_at_once(name, window, monkeypatch):
    """Rows that end in the first piece, at its end, in the third; no piece is read in vain."""
    engine, variables = engine_of(name, "greedy")
    config = dataclasses.replace(engine.llama.config, sliding_window=window)
    llama = engine.llama.clone(config=config)
    more = {"no_repeat_ngram_size": 2, "logprobs": 2}
    engine = dataclasses.replace(engine, llama=llama, **more)
    whole = prefilled(engine, variables, monkeypatch, 32)
    monkeypatch.setattr(model.masks, "MAX_MASKED", 4)  # pieces of eight tokens are long
    monkeypatch.setattr(model.running_softmax, "SLOTS", 8)
    pieces = prefilled(engine, variables, monkeypatch, 8)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), pieces, whole)
    assert len(set(pieces.root_B.tolist())) > 1


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", some(ALL, "hydrapp"))
def test_plain_steps_of_a_gated_engine_are_read_later(name):
    """More than fit into one pass, and rows that end at other steps: the state of a drafter that reads each at once."""
    engine, variables = engine_of(name, "greedy")
    sizes, request = (Tree.none(), engine.tree), request_of("greedy")
    plain, gate = Tree.none(), Gate.before_text(sizes, [1.0, 1.0]).always(0)
    ends = []
    for tree, gated, gates in ((plain, (), None), (engine.tree, sizes, gate)):
        one = dataclasses.replace(engine, tree=tree, gated=gated)
        state, _ = generation.begin(
            one, variables, dataclasses.replace(request, gate=gates)
        )
        state, _ = decode_loop(one, variables, state, np.int32(40))
        ends.append(visible(state.drafter, state.cache.slots, np.asarray(state.length_B)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), *ends)


def check_replay(engine, variables, request):
    """Replaying teacher-forced ranks gives the number of steps that decoding takes."""
    progress = decoded(engine, variables, request)
    texts = [p + t for p, t in zip(PROMPTS, texts_of(progress))]
    tokens, lengths = np.zeros((3, 64), np.int32), np.array([len(t) for t in texts])
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    noise = None
    if engine.acceptance == "sampled":
        keys = row_keys(jnp.array(request.seed, jnp.uint32), jnp.arange(3))
        noise = (keys, jnp.array(request.temperature))
    backbone = engine.backbone(variables)
    ranks = jax.jit(recording_ranks.rank_tuples, static_argnums=(0, 6))(
        engine.drafter, variables["heads"], backbone, tokens, lengths, noise,
        engine.no_repeat_ngram_size,
    )  # fmt: skip
    found, nodes = [], set(engine.tree.choices)
    for prompt, text, ranks_TK in zip(PROMPTS, texts, np.asarray(ranks).tolist()):
        at, steps = len(prompt), 0
        while at < len(text) - 1:  # the root is at `at`
            path = ()
            for rank in ranks_TK[at - 1]:
                if (*path, rank) not in nodes or at + len(path) + 1 >= len(text):
                    break
                path = (*path, rank)
            at, steps = at + len(path) + 1, steps + 1
        found.append(steps)
    assert found == progress.steps_B.tolist()


@pytest.mark.parametrize("name", some(NAMES, "hydrapp"))
def test_calibration_predicts_what_decoding_accepts(name):
    check_replay(*engine_of(name, "greedy"), request_of("greedy"))


@pytest.mark.parametrize("name", some(NAMES, "hydrapp", "medusa"))
def test_rejection_finds_the_logits_that_children_came_from(name):
    """Children of a node are the best tokens of the row that `parents_logits` gives for it."""
    backbone, drafter, params = noisy(name)
    tree = WILD.dense
    rows = family.random_rows(np.random.default_rng(6), E=family.width(drafter))
    state = family.committed(drafter, backbone, params, rows, [4, 6])
    propose = family.proposed_logits(drafter, backbone, tree)
    nodes, logits = propose(params, state, np.array([1, 2], np.int32))
    ranked = [Ranked(x, x) for x in logits]
    for depth in range(tree.depth):
        for node in tree.level(depth):
            children = [c for c in tree.children_MC[node] if c]
            if not children:
                continue
            node_B = np.full(2, node, np.int32)
            q_BV = rejection.parents_logits(tree, depth, ranked, node_B)
            best_BC = np.argsort(-np.asarray(q_BV), axis=-1)[:, : len(children)]
            np.testing.assert_array_equal(nodes[:, children], best_BC)
