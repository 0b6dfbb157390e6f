"""The engine, which is fixed at compile time, and the state of the rows being decoded."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from medusa_jax.decoding.acceptance import RULES, Rule
from medusa_jax.decoding.logprobs import Logprobs
from medusa_jax.decoding.sampling import Sampling
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.decoding.tree_size.gate import Gate
from medusa_jax.heads.drafter import Drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.llama import Llama
from medusa_jax.model.product import at_least_f32
from medusa_jax.programs import program
from medusa_jax.sharding import Params, PyTree, on_all
from medusa_jax.tree.tree import Tree, chain_as_deep

# Positions of plain steps that the drafter reads in one pass (`gated.py`).
DEFERRED = 16
# Most tokens of a row that are expected in its text.
PREDICTED = 4096


@dataclass(frozen=True)
class Engine:
    """All compile-time constants of decoding (a static argument of jit).

    Attributes:
      llama: the backbone, for prepared (fused) parameters. Given the drafter's taps.
      drafter: the draft heads.
      tree: the draft tree; the empty one is plain decoding. Converted to a dense tree if the rule needs it.
      acceptance: name of the rule, see `acceptance.RULES`.
      no_repeat_ngram_size: n-grams of this size occur at most once in a text; 0 bars nothing.
      logprobs: number of alternatives with log-probabilities per emitted token; None keeps no
        log-probabilities.
      gated: sizes of `tree` that steps choose from (`gate.py`), plain decoding first and `tree` last; () if
        all steps take `tree`.
      short: tree of the steps with constraints in which little is forced; None: `tree`.
    """

    llama: Llama
    drafter: Drafter
    tree: Tree
    acceptance: str = "greedy"
    no_repeat_ngram_size: int = 0
    logprobs: int | None = None
    gated: tuple[Tree, ...] = ()
    short: Tree | None = None

    def __post_init__(self) -> None:
        if self.rule.dense:
            object.__setattr__(self, "tree", self.tree.dense)
        elif self.rule.by_drafts:
            # All rows together choose chain or spares; here a text would then depend on other rows.
            object.__setattr__(self, "tree", self.tree.fixed)
        if self.llama.taps != self.drafter.taps:
            tapped = self.llama.clone(taps=self.drafter.taps)
            object.__setattr__(self, "llama", tapped)

    @property
    def kernels(self) -> Kernels:
        """The operations that differ by platform."""
        return self.llama.kernels

    @property
    def rule(self) -> Rule:
        return RULES[self.acceptance]

    def backbone(self, variables: Params) -> Backbone:
        """The backbone with these parameters."""
        return Backbone(self.llama, variables["backbone"])

    @property
    def free_slots(self) -> int:
        """Slots to keep free after a row's text, as many as a pass writes: the tree's nodes, or deferred positions."""
        return max(self.tree.n_nodes, DEFERRED) if self.gated else self.tree.n_nodes

    @property
    def depth_only(self) -> "Engine":
        """The engine for reading prompts and growing caches.

        It keeps only the tree's depth and whether it has copied nodes, so trees of equal depth share
        these compiled programs.
        """
        return replace(self, tree=chain_as_deep([self.tree]), gated=(), short=None)

    @property
    def keeps_text(self) -> bool:
        """Whether a state contains its texts, to bar n-grams or to copy from them."""
        return bool(self.no_repeat_ngram_size or self.tree.copied_C.size)


class RowOptions(NamedTuple):
    """What requests ask for, by row; as in `DecodeState`."""

    sampling: Sampling
    limit_B: jax.Array
    end_BQ: jax.Array


class DecodeState(struct.PyTreeNode):
    """State of a batch being decoded; all arrays have static shapes.

    Attributes:
      cache: keys and values; slots [0, length) of a row are committed.
      drafter: the drafter's state.
      sampling: per-row sampling parameters.
      tokens_BO: emitted tokens; [0, n_new) of a row are valid.
      depth_BO: tree depth at which each was accepted, negative for tokens copied from the text; 0 for
        the verifier's tokens (the first token and the bonus tokens).
      n_new_B: tokens emitted so far, including the one from prefill.
      limit_B: most tokens the row may emit.
      end_BQ: tokens that end the row, see `stopping.pack_ends`.
      length_B: text positions in the cache, without the root.
      root_B: the last emitted token.
      status_B: RUNNING, STOPPED (by such a token), LIMIT, PAUSED, STUCK or BROKEN (`stopping`).
      steps_B: decode steps while the row was running.
      histogram_BL: numbers of steps that appended 1, 2, ..., L tokens.
      text_BS: prompt and emitted tokens by position, valid up to the root; None unless the engine
        keeps the text. S is the cache's slots plus a path.
      predicted_BP: tokens that are expected in the text, to copy from, then `NO_TOKEN`; served rows only.
      logprobs: log-probabilities of `tokens_BO`; None unless the engine keeps them.
      gate: chooses the size of the next step's tree; None unless the engine is gated.
      host_1: number of the function that steps with constraints call; None: they call none.
    """

    cache: KVCache
    drafter: PyTree
    sampling: Sampling
    tokens_BO: jax.Array
    depth_BO: jax.Array
    n_new_B: jax.Array
    limit_B: jax.Array
    end_BQ: jax.Array
    length_B: jax.Array
    root_B: jax.Array
    status_B: jax.Array
    steps_B: jax.Array
    histogram_BL: jax.Array
    text_BS: jax.Array | None = None
    predicted_BP: jax.Array | None = None
    logprobs: Logprobs | None = None
    gate: Gate | None = None
    host_1: jax.Array | None = None


class Progress(struct.PyTreeNode):
    """Copies for the host to read while the next loop runs; never donated."""

    tokens_BO: jax.Array
    depth_BO: jax.Array
    n_new_B: jax.Array
    length_B: jax.Array
    status_B: jax.Array
    steps_B: jax.Array
    histogram_BL: jax.Array
    logprobs: Logprobs | None
    gate: Gate | None


def fresh_state(
    engine: Engine, slots: int, options: RowOptions, tokens_BO: jax.Array
) -> DecodeState:
    """A state of running rows without text, with `slots` cache slots each.

    Args:
      tokens_BO: zeros, the room for new tokens.
    """
    dtype, B = engine.llama.dtype, tokens_BO.shape[0]
    zero_B = jnp.zeros((B,), jnp.int32)
    text_BS = None
    if engine.keeps_text:
        text_BS = jnp.zeros((B, text_slots(engine, slots)), jnp.int32)
    return DecodeState(
        **options._asdict(),
        cache=KVCache.zeros(engine.llama.config, B, slots, dtype),
        drafter=engine.drafter.start(B, slots, dtype),
        tokens_BO=tokens_BO,
        depth_BO=tokens_BO.astype(jnp.int8),
        n_new_B=zero_B,
        length_B=zero_B,
        root_B=zero_B,
        status_B=zero_B + RUNNING,
        steps_B=zero_B,
        histogram_BL=jnp.zeros((B, engine.tree.path_length), jnp.int32),
        text_BS=text_BS,
        logprobs=empty_logprobs(engine, tokens_BO),
    )


def empty_logprobs(engine: Engine, tokens_BO: jax.Array) -> Logprobs | None:
    """Zeros for the log-probabilities of new tokens; None if the engine keeps none."""
    if engine.logprobs is None:
        return None
    shape, dtype = tokens_BO.shape, at_least_f32(engine.llama.dtype)
    best = (*shape, engine.logprobs)
    zeros = jnp.zeros(shape, dtype), jnp.zeros(best, dtype), jnp.zeros(best, jnp.int32)
    return Logprobs(*zeros)


def progress_of(state: DecodeState) -> Progress:
    """The host's view of a state."""
    return Progress(
        **{name: getattr(state, name) for name in Progress.__dataclass_fields__}
    )


@program(static_argnums=0)
def copied_progress(engine: Engine, state: DecodeState) -> Progress:
    """A copy of the host's view, which survives donating the state."""
    return on_all(engine.llama.mesh, jax.tree.map(jnp.copy, progress_of(state)))


def text_slots(engine: Engine, slots: int) -> int:
    """Tokens of text to make room for: the cache's slots, the root, and a whole path after it."""
    return slots + engine.tree.path_length
