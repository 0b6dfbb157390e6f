"""What the decoding tests share: tiny random models, random trees, and a drafter that is right
as often as a test wants it to be.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import decoder, random_params
from trees import TracedTree

from medusa_jax.arch import DELTA, EPSILON
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.decoding import constrained, generation
from medusa_jax.decoding.acceptance import Drafts, Verified
from medusa_jax.decoding.sampling import Sampling, filtered, row_keys
from medusa_jax.decoding.state import Engine, Progress, progress_of
from medusa_jax.decoding.step import after_draft, draft
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.heads.drafter import Drafter, Proposal, Ranked
from medusa_jax.heads.registry import make_drafter
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

# A short prompt, one that repeats itself and one of a single token; rows of different kinds.
PROMPTS = [[4], [1, 2, 3, 1, 2, 3, 1, 2], [0, 0, 0, 0, 0]]
LIMITS = [40, 17, 29]
SAMPLED = {
    "temperature": [1.0, 0.0, 0.7],
    "top_k": [0, 0, 5],
    "top_p": [1.0, 1.0, 0.9],
    "min_p": [0.02, 0.0, 0.0],
}


@cache
def random_model(config: LlamaConfig, seed: int):
    """Stored parameters of a backbone, the backbone as it decodes, its prepared parameters."""
    params = random_params(config, seed)
    return (params, *decoder(config, params))


@dataclasses.dataclass(frozen=True)
class Planted(Drafter):
    """Knows the text that plain decoding gives and hides it in the tree.

    In every step one node is drawn uniformly; its whole path holds the true tokens, all other
    nodes hold noise. So every depth, the deepest included, is accepted often. Its state is the
    position of the root. Parameters:
      text_BS: prompt and true continuation by position;
      pick_BS: for a root at this position, which node is drawn, in [0, 1);
      noise_BSM: for a root at this position, what the other nodes hold.
    """

    def start(self, batch, slots, dtype):
        return jnp.zeros((batch,), jnp.int32)

    def commit(self, params, backbone, state, new):
        last_B1 = jnp.maximum(new.n_B - 1, 0)[:, None]
        root_B = jnp.take_along_axis(new.positions_BT, last_B1, axis=1)[:, 0] + 1
        return jnp.where(new.n_B > 0, root_B, state).astype(jnp.int32)

    def propose(self, params, backbone, state, request):
        root_B, tree, _ = request
        depth_M, M = jnp.asarray(tree.depth_M), tree.n_nodes
        at_B1 = state[:, None]
        picked_B = jnp.take_along_axis(params["pick_BS"], at_B1, axis=1)[:, 0] * M
        on_path_BM = jnp.asarray(tree.mask_MM)[picked_B.astype(jnp.int32)]
        true_BM = jnp.take_along_axis(params["text_BS"], at_B1 + depth_M[None, :], axis=1)
        noise_B1M = jnp.take_along_axis(params["noise_BSM"], at_B1[..., None], axis=1)
        drafts_BM = jnp.where(on_path_BM, true_BM, noise_B1M[:, 0, :M])
        return Proposal(jnp.where((depth_M == 0)[None, :], root_B[:, None], drafts_BM))


def fresh_medusa(config, tree, acceptance="greedy", seed=0, n_heads=2, **fields):
    """An engine and its variables. Its untrained Medusa heads repeat the LM head's scores."""
    params, llama, backbone = random_model(config, seed)
    drafter = make_drafter(HeadsConfig(n_heads=n_heads), config)
    heads = drafter.init(jax.random.key(0), Backbone(Llama(config, jnp.float64), params))
    engine = Engine(llama, drafter, tree, acceptance, **fields)
    return engine, {"backbone": backbone, "heads": heads}


def planted_params(texts, vocab: int, seed: int, slots: int = 256, nodes: int = 32):
    """Parameters of `Planted` for texts (prompt + continuation) in batch order."""
    rng = np.random.default_rng(seed)
    text_BS = rng.integers(0, vocab, (len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        text_BS[row, : len(text)] = text
    return {
        "text_BS": text_BS,
        "pick_BS": rng.random((len(texts), slots), np.float32),
        "noise_BSM": rng.integers(0, vocab, (len(texts), slots, nodes), np.int32),
    }


def planted(config: LlamaConfig) -> Planted:
    """The planted drafter for a backbone; its trees may be of any depth."""
    return Planted(HeadsConfig(drafter="planted", n_heads=99), config)


@partial(jax.jit, static_argnums=0)
def decode_traced(engine: Engine, variables, state, tree: TracedTree) -> Progress:
    """Run to the end with a tree that is traced; `engine.tree` only gives the sizes."""

    def running(state):
        return jnp.any(state.status_B == RUNNING)

    def step(state):
        drafts = draft(engine, variables, state, tree)
        return after_draft(engine, variables, state, drafts)

    return progress_of(jax.lax.while_loop(running, step, state))


def streamed(engine, variables, request, steps=None, **how):
    """Stream a request, with or without guides; `steps` sets the length of all chunks."""
    parts = engine, variables, request, *generation.begin(engine, variables, request)
    with pytest.MonkeyPatch.context() as patch:
        if steps:
            patch.setattr(generation, "CHUNK_STEPS", (steps, steps))
        yield from (constrained if request.guides else generation).stream(*parts, **how)


def decoded(engine, variables, request) -> Progress:
    """The progress at the end of a request, with guides or without."""
    how = {} if request.guides else {"read_along": False}
    *_, progress = streamed(engine, variables, request, **how)
    return progress


def drafted(
    config, model, request, known, tree, seed, acceptance="greedy", example=None, **fields
) -> Progress:
    """Decode with a planted drafter that knows the continuations `known`.

    Args:
      model: of `random_model`.
      example: a tree of the same sizes; `tree` is then traced, and all of them share one program.
    """
    _, llama, backbone = model
    engine = Engine(llama, planted(config), example or tree, acceptance, **fields)
    texts = [p + t for p, t in zip(request.prompts, known)]
    heads = planted_params(texts, config.vocab_size, seed)
    variables = {"backbone": backbone, "heads": heads}
    if example is None:
        progress = decoded(engine, variables, request)
    else:
        state, cache_sizes = generation.begin(engine, variables, request)
        if len(cache_sizes) > 1:  # this loop does not grow the cache
            state = generation.grow(engine, cache_sizes[-1], state)
        progress = decode_traced(engine, variables, state, TracedTree.of(tree))
    check_counts(progress)
    return progress


def verified(tree, nodes_BM, logits_BMV, sampling, length_B=None, draft_logits=()):
    """The input of an acceptance rule. `draft_logits` has the logits of the guesses by depth."""
    drafts = Drafts(tree, nodes_BM, tuple(Ranked(x, x) for x in draft_logits), None)
    return Verified(drafts, None, logits_BMV, None, sampling, length_B)


# Called on its own, every `lax.cond` of it would be compiled again each time.
filtered_scores = jax.jit(partial(filtered, CpuKernels()))


def sampling_of(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Sampling:
    """The same parameters in every row; seed 0, the row number as request id."""
    full = lambda value, dtype=np.float32: jnp.asarray(np.full(rows, value, dtype))  # noqa: E731
    key = row_keys(full(0, np.uint32), jnp.asarray(np.arange(rows, dtype=np.int32)))
    filters = full(temperature), full(top_k, np.int32), full(top_p), full(min_p)
    return Sampling(*filters, key, full(EPSILON), full(DELTA))


def plain_texts(config, model, request, acceptance="greedy", **fields):
    """What the plain loop emits; `model` as in `drafted`."""
    _, llama, backbone = model
    plain = Engine(llama, planted(config), Tree.none(), acceptance, **fields)
    return texts_of(decoded(plain, {"backbone": backbone, "heads": {}}, request))


def texts_of(progress: Progress) -> list[list[int]]:
    """Emitted tokens of each row."""
    tokens, counts = np.asarray(progress.tokens_BO), np.asarray(progress.n_new_B)
    return [tokens[row, :n].tolist() for row, n in enumerate(counts)]


def check_counts(progress: Progress) -> None:
    """What the counters of a finished batch always satisfy."""
    histogram = np.asarray(progress.histogram_BL)
    n_new, depth = np.asarray(progress.n_new_B), np.abs(progress.depth_BO)
    appended = (histogram * np.arange(1, histogram.shape[1] + 1)).sum(1)
    np.testing.assert_array_equal(appended, n_new - 1)
    np.testing.assert_array_equal(histogram.sum(1), np.asarray(progress.steps_B))
    for row, n in enumerate(n_new):  # depths run 1, 2, ... and fall back to 0
        steps = depth[row, 1:n]
        before = np.concatenate([[0], steps[:-1]])
        assert depth[row, 0] == 0
        assert ((steps == 0) | (steps == before + 1)).all()
