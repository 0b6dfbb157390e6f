"""What the decoding tests share: tiny random models, random trees, and a drafter that is right
as often as a test wants it to be.
"""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.sampling import Sampling, filtered, row_keys
from medusa_jax.heads.drafter import Backbone, Drafter
from medusa_jax.model.llama import Llama, decoding_config, init_params, prepare
from medusa_jax.tree import Tree


def tiny_config(**fields) -> LlamaConfig:
    """Two layers, four query heads on two key/value heads."""
    small = LlamaConfig(23, 16, 2, 4, 2, 6, 20, max_position=512)
    return dataclasses.replace(small, **fields)


def random_like(shapes, seed: int, scale: float = 1.5):
    """Float64 numpy parameters of these shapes, large enough that every part matters.

    Initialisation proper starts with zero biases, unit norms and a small embedding, under
    which mistakes in attention hardly move a logit; and it is a large program to compile.
    """
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = path[-1].key
        if name in ("scale", "bias"):
            return (name == "scale") + 0.3 * rng.standard_normal(leaf.shape)
        fan_in = 1 if name == "embedding" else leaf.shape[0]
        return rng.standard_normal(leaf.shape) * scale / np.sqrt(fan_in)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def random_params(config: LlamaConfig, seed: int, scale: float = 1.5):
    """Stored (unfused) parameters of a backbone, see `random_like`."""
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    params = random_like(shapes, seed, scale)
    if "lm_head" in params:
        params["lm_head"]["kernel"][:, 0] *= 1.5  # token 0 is an ordinary, frequent one
    return params


def random_heads(drafter: Drafter, backbone: Backbone, seed: int, scale: float = 1.0):
    """Parameters of draft heads, see `random_like`."""
    shapes = jax.eval_shape(drafter.init, jax.random.key(0), backbone)
    return random_like(shapes, seed, scale)


@partial(jax.jit, static_argnums=(1, 2))
def _prepared(params, config: LlamaConfig, dtype):
    return prepare(params, config, dtype)


def decoder(config: LlamaConfig, params, dtype=jnp.float64):
    """The backbone as the decode loop runs it, and its prepared parameters."""
    return Llama(decoding_config(config), dtype, shards=1), _prepared(params, config, dtype)


@partial(jax.jit, static_argnums=0)
def _forward_logits(llama, params, tokens_BT):
    def run(module, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        return module.lm_head(module.forward(tokens, positions, jnp.ones_like(tokens)))

    return llama.apply({"params": params}, tokens_BT, method=run)


def forward_logits(config: LlamaConfig, params, text, dtype=jnp.float64) -> np.ndarray:
    """Logits [T, V] of one text by the teacher-forced pass: no cache, no tree, no fusing."""
    padded = -(-len(text) // 64) * 64
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(_forward_logits(Llama(config, dtype), params, tokens))[0, : len(text)]


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
        if tree.depth == 0:
            return root_B[:, None]
        depth_M, M = jnp.asarray(tree.depth_M), tree.n_nodes
        at_B1 = state[:, None]
        picked_B = jnp.take_along_axis(params["pick_BS"], at_B1, axis=1)[:, 0] * M
        on_path_BM = jnp.asarray(tree.mask_MM)[picked_B.astype(jnp.int32)]
        true_BM = jnp.take_along_axis(params["text_BS"], at_B1 + depth_M[None, :], axis=1)
        noise_BM = jnp.take_along_axis(params["noise_BSM"], at_B1[..., None], axis=1)[
            :, 0, :M
        ]
        drafts_BM = jnp.where(on_path_BM, true_BM, noise_BM)
        return jnp.where((depth_M == 0)[None, :], root_B[:, None], drafts_BM)


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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["parent_M", "depth_M", "rank_M", "mask_MM", "ancestors_ML"],
    meta_fields=["n_nodes", "depth", "path_length", "max_rank"],
)
@dataclasses.dataclass
class TreeArrays:
    """A tree as traced arrays: one compilation serves all trees of these sizes."""

    parent_M: jax.Array
    depth_M: jax.Array
    rank_M: jax.Array
    mask_MM: jax.Array
    ancestors_ML: jax.Array
    n_nodes: int
    depth: int
    path_length: int
    max_rank: int
    copied_C: ClassVar[np.ndarray] = np.zeros(0, int)

    @property
    def drafted(self) -> "TreeArrays":
        """Nothing is copied in it."""
        return self

    @classmethod
    def of(cls, tree: Tree, max_rank: int = 9) -> "TreeArrays":
        names = ("parent_M", "depth_M", "rank_M", "mask_MM", "ancestors_ML")
        arrays = {name: jnp.asarray(getattr(tree, name)) for name in names}
        return cls(
            **arrays,
            n_nodes=tree.n_nodes,
            depth=tree.depth,
            path_length=tree.path_length,
            max_rank=max_rank,
        )


@st.composite
def trees(draw, n_nodes: int | None = None, depth: int | None = None, max_rank: int = 4):
    """A random tree; with `n_nodes` and `depth` given, of exactly these sizes. Ranks have gaps."""
    if n_nodes is None:
        n_nodes = draw(st.integers(1, 14))
    if depth is None:
        depth = draw(st.integers(min(1, n_nodes - 1), min(4, n_nodes - 1)))
    paths: list[tuple[int, ...]] = [()]
    for i in range(n_nodes - 1):
        if i < depth:  # first a path to the full depth
            parent = paths[-1]
        else:
            free = [
                p
                for p in paths
                if len(p) < depth and sum(q[:-1] == p for q in paths if q) <= max_rank
            ]
            if not free:
                break
            parent = draw(st.sampled_from(free))
        taken = {q[-1] for q in paths if q and q[:-1] == parent}
        rank = draw(st.sampled_from([r for r in range(max_rank + 1) if r not in taken]))
        paths.append((*parent, rank))
    return Tree.from_choices(draw(st.permutations(paths[1:])))


def random_tree(rng, n_nodes: int, depth: int, max_rank: int = 6) -> Tree:
    """A random tree of exactly these sizes, without hypothesis; ranks have gaps."""
    paths = [(0,) * d for d in range(1, depth + 1)]
    while len(paths) < n_nodes - 1:
        above = [p for p in [(), *paths] if len(p) < depth]
        new = (*above[rng.integers(len(above))], int(rng.integers(max_rank + 1)))
        if new not in paths:
            paths.append(new)
    return Tree.from_choices(paths)


@partial(jax.jit, static_argnums=0)
def decode_traced(engine: loop.Engine, variables, state, tree: TreeArrays) -> loop.Progress:
    """Run to the end with a tree that is traced; `engine.tree` only gives the sizes."""

    def running(state):
        return jnp.any(state.status_B == loop.RUNNING)

    state = jax.lax.while_loop(
        running, lambda s: loop.decode_step(engine, variables, s, tree), state
    )
    return loop.progress_of(state)


# Called on its own, every `lax.cond` of it would be compiled anew each time.
filtered_scores = jax.jit(filtered)


def sampling_of(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Sampling:
    """The same parameters in every row; seed 0, the row number as request id."""
    full = lambda value, dtype=np.float32: jnp.asarray(np.full(rows, value, dtype))  # noqa: E731
    key = row_keys(full(0, np.uint32), jnp.asarray(np.arange(rows, dtype=np.int32)))
    return Sampling(full(temperature), full(top_k, np.int32), full(top_p), full(min_p), key)


def texts_of(progress: loop.Progress) -> list[list[int]]:
    """Emitted tokens of each row."""
    tokens, counts = np.asarray(progress.tokens_BO), np.asarray(progress.n_new_B)
    return [tokens[row, :n].tolist() for row, n in enumerate(counts)]


def check_counts(progress: loop.Progress) -> None:
    """What the counters of a finished batch always satisfy."""
    histogram = np.asarray(progress.histogram_BL)
    n_new, depth = np.asarray(progress.n_new_B), np.asarray(progress.depth_BO)
    appended = (histogram * np.arange(1, histogram.shape[1] + 1)).sum(1)
    np.testing.assert_array_equal(appended, n_new - 1)
    np.testing.assert_array_equal(histogram.sum(1), np.asarray(progress.steps_B))
    for row, n in enumerate(n_new):  # depths run 1, 2, ... and fall back to 0
        steps = depth[row, 1:n]
        before = np.concatenate([[0], steps[:-1]])
        assert depth[row, 0] == 0
        assert ((steps == 0) | (steps == before + 1)).all()
