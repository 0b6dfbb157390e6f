"""Draft vocabularies: heads that score some of the tokens draft as those that score all would, had
these no other guesses, and what is emitted stays what plain decoding emits."""

import dataclasses

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, wide
from closeness import assert_close
from family import IDS
from numpy_layers import numpy_norm
from planted import check_counts, decoded, texts_of
from safetensors.numpy import load_file, save_file
from test_contract import check_replay, plain_texts, request_of, seven
from tiny import random_params, tiny_arch
from trees import WILD

from medusa_jax.decoding.state import Engine
from medusa_jax.errors import UserError
from medusa_jax.files.layouts import heads_io, native_heads
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.heads import vocabulary
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import make_mesh
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
NAMES = sorted(DRAFTERS)
KINDS = ("own", "shared", "low_rank")
EVERY = [(name, kind) for name in NAMES for kind in KINDS]


def pair_of(name, lm_head, backbone, ids, seed=0):
    """(drafter, parameters) over all tokens and over `ids`, the second a cut of the first.

    The second's parameters are as loaded for decoding: with the ids, and the LM head if shared.
    """
    heads = family.small_heads(name, lm_head=lm_head, rank=3)
    drafter, params = family.drafter_of(heads, backbone, seed)
    few = dataclasses.replace(drafter.heads, draft_vocab=len(ids))

    def cut(path, leaf):
        names = [key.key for key in path]
        is_output = names[-2] == "lm_head" and names[-1] in ("kernel", "up", "bias")
        is_output |= names[-2:] == ["markov_w2", "kernel"]
        return leaf[..., ids] if is_output else leaf

    cut_params = jax.tree_util.tree_map_with_path(cut, params)
    group = {"ids": jnp.asarray(ids)}
    if lm_head == "shared":
        config = backbone.llama.config
        columns = vocabulary.scored_columns(config, backbone.params, ids)
        group["lm_head"] = {"kernel": columns}
    narrow = make_drafter(few, backbone.llama.config)
    return (drafter, params), (narrow, cut_params | {vocabulary.GROUP: group})


@pytest.mark.parametrize(
    "name, lm_head", thinned(EVERY, ("dflash", "low_rank"), ("hydra", "own"))
)
def test_rank_r_is_the_whole_drafters_best_r_among_them(name, lm_head):
    """With the same tokens before it, a node holds what is r-th of the chosen by the logits of all.

    Hydra's logits depend on the tokens above: the whole drafter is led down the other's path.
    """
    backbone = family.stored_base()
    (whole, params), (narrow, cut) = pair_of(name, lm_head, backbone, IDS)
    tree, root = Tree.chain(4), np.array([1, 4], np.int32)
    rows = family.random_rows(np.random.default_rng(5), E=family.width(narrow))
    seen = vocabulary.for_drafting(backbone, cut)
    state = family.committed(narrow, seen, cut, rows, [4, 6])
    nodes, logits = family.proposed_logits(narrow, seen, WILD)(cut, state, root)
    assert np.isin(nodes[:, 1:], IDS).all()
    np.testing.assert_array_equal(nodes[:, 0], root)
    chain = family.proposed_logits(whole, backbone, tree)
    for leaf in range(1, WILD.n_nodes):
        path = np.flatnonzero(WILD.mask_MM[leaf])[1:]
        follow = np.zeros((2, 4), np.int32)
        follow[:, : len(path)] = nodes[:, path]
        _, of_all = chain(params, state, root, follow)
        for depth, node in enumerate(path):
            of_chosen = np.asarray(of_all[depth]).reshape(2, -1)[:, IDS]
            best = IDS[np.argsort(-of_chosen, axis=-1)][:, WILD.rank_M[node]]
            np.testing.assert_array_equal(nodes[:, node], best, str((leaf, depth)))
    assert all(x.shape[-1] == len(IDS) for x in logits)


# The engine's promise in float64: as in test_contract.py, with four tokens of seven.

FOUR = np.array([1, 2, 4, 6], np.int32)
WIDE = Tree.from_choices(
    {(r,) for r in range(4)} | {(r, s) for r in range(4) for s in (0, 1, 3)}
    | {(r, 0, 1) for r in range(4)} | {(1, 0, 1, 2)}
)  # fmt: skip


def engine_of(name, lm_head, acceptance, tied=False, n_gram=0):
    config, params, llama, backbone = seven(tied)
    stored = Backbone(Llama(config, jnp.float64), params)
    drafter, heads = pair_of(name, lm_head, stored, FOUR, seed=3)[1]
    engine = Engine(llama, drafter, WIDE, acceptance, n_gram)
    return engine, {"backbone": backbone, "heads": heads}


@pytest.mark.parametrize(
    "name, lm_head, acceptance, tied, n_gram",
    thinned(
        [(name, kind, "greedy", False, 0) for name, kind in EVERY]
        + [(name, "shared", "sampled", True, 3) for name in NAMES]
        + [("hydra", "own", "greedy", False, 4)],
        ("hydrapp", "shared", "sampled", True, 3),
    ),
)
def test_the_text_is_that_of_plain_decoding(name, lm_head, acceptance, tied, n_gram):
    """Though three tokens of seven are never drafted; the heads are right often all the same."""
    engine, variables = engine_of(name, lm_head, acceptance, tied, n_gram)
    progress = decoded(engine, variables, request_of(acceptance))
    texts = plain_texts(acceptance, tied, n_gram)
    assert texts_of(progress) == texts
    check_counts(progress)
    assert (np.asarray(progress.histogram_BL).sum(0)[:2] > 0).all()
    drafted = np.asarray(progress.tokens_BO)[np.asarray(progress.depth_BO) > 0]
    assert len(drafted) > 5 and np.isin(drafted, FOUR).all()


@pytest.mark.parametrize("n_gram", [2, *wide(0)])
@pytest.mark.parametrize("acceptance", wide("sampled", "greedy"))
def test_ranks_predict_what_decoding_accepts(acceptance, n_gram):
    """So noise and bars of a drafted token are its own, not those of its place among the logits."""
    engine, variables = engine_of("medusa", "own", acceptance, n_gram=n_gram)
    engine = dataclasses.replace(engine, tree=Tree.cartesian([1, 2, 1]))
    check_replay(engine, variables, request_of(acceptance))


@pytest.mark.parametrize("name", NAMES)
def test_the_start_is_the_backbones_lm_head_there(name):
    """Heads of every kind start from these columns, of a tied LM head as well."""
    given = np.random.default_rng(1).standard_normal((3, family.D))
    for kind, tied in (("own", False), ("low_rank", True), ("shared", True)):
        config = tiny_arch(tie_embeddings=tied)
        backbone = Backbone(Llama(config, jnp.float64), random_params(config, 0))
        heads = family.small_heads(name, lm_head=kind, rank=11, draft_vocab=len(IDS))
        drafter = make_drafter(heads, config)
        # DSpark's features end with W1 of the token before, whose bias is zero at first.
        x = np.pad(given, ((0, 0), (0, getattr(drafter.heads, "markov_rank", 0))))
        read = x[:, : family.D]
        if name == "eagle3":  # read through a norm, which is the backbone's at first
            read = numpy_norm(backbone.params["norm"]["scale"], x)

        @jax.jit
        def logits_of(backbone, drafter=drafter, read=read, x=x):
            narrow = vocabulary.narrowed(backbone, jnp.asarray(IDS))
            params = drafter.init(jax.random.key(0), narrow)
            return drafter.head_logits(params, narrow, 2, x), backbone.lm_head(read)

        logits, of_all = logits_of(backbone)
        assert_close(logits, np.asarray(of_all)[:, IDS], dtype=jnp.float32)


# On disk.


def saved(path, kind="low_rank", ids=IDS):
    """Medusa heads with these ids in a directory, whatever they are; their file and configuration."""
    backbone = family.stored_base()
    _, (drafter, params) = pair_of("medusa", kind, backbone, IDS)
    record = {"d_model": 16, "vocab_size": 23, "fingerprint": "x"}
    native_heads.save_heads(
        str(path), drafter.heads, params, base=record, recipe={}, dtype="bfloat16"
    )
    file = path / "heads.safetensors"
    if ids is not IDS:
        save_file(load_file(file) | {native_heads.IDS: ids}, file)
    return file, drafter, backbone.llama.config


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_stored_with_the_heads(kind, tmp_path):
    """As ids in whatever type the weights are; the shared LM head is not stored."""
    file, drafter, config = saved(tmp_path, kind)
    heads, params, _ = heads_io.load_heads(str(tmp_path), config, make_mesh(), n_heads=2)
    assert heads == dataclasses.replace(drafter.heads, n_heads=2)
    assert set(params) == {"heads_0", "heads_1", vocabulary.GROUP}
    assert set(params[vocabulary.GROUP]) == {"ids"}
    ids = params[vocabulary.GROUP]["ids"]
    assert ids.dtype == jnp.int32 and open_heads(str(tmp_path)).ids.dtype == ids.dtype
    np.testing.assert_array_equal(ids, IDS)
    assert load_file(file)[native_heads.IDS].dtype == np.int32


WANTED = "should hold 11 ascending token ids below 23"


@pytest.mark.parametrize(
    "ids, problem",
    [
        (np.append(IDS[:-1], np.int32(23)), WANTED),
        (np.append(IDS[:-1], IDS[-2]), WANTED),
        (IDS[:-1], WANTED),
        (IDS.astype(np.float32), "in int32 is missing"),
    ],
)
def test_bad_ids(ids, problem, tmp_path):
    _, _, config = saved(tmp_path, ids=ids)
    for read in (
        lambda: heads_io.load_heads(str(tmp_path), config, make_mesh()),
        lambda: open_heads(str(tmp_path)).read(config),
    ):
        with pytest.raises(UserError, match=problem):
            read()


def test_the_most_frequent():
    """By count, of equal ones the lower id; by id in the end."""
    counts = np.array([5, 0, 9, 5, 7])
    assert vocabulary.most_frequent(counts, 3).tolist() == [0, 2, 4]
    assert vocabulary.most_frequent(counts, 5).tolist() == [0, 1, 2, 3, 4]
    assert vocabulary.covered(counts, 2) == 16 / 26
