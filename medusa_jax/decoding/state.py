"""The engine, which is fixed at compile time, and the state of the rows being decoded."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct

from medusa_jax.decoding.acceptance import RULES, Rule
from medusa_jax.decoding.logprobs import Logprobs
from medusa_jax.decoding.sampling import Sampling
from medusa_jax.devices.platforms import program
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.extra_rows import WithExtraRows
from medusa_jax.model.cache import KVCache
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import PyTree, on_all
from medusa_jax.tree import Tree, stand_in


@dataclass(frozen=True)
class Engine:
    """All compile-time constants of decoding (a static argument of jit).

    Attributes:
      llama: the backbone, for prepared (fused) parameters. Given the drafter's taps.
      drafter: the draft heads.
      tree: the draft tree; the empty one is autoregressive decoding. Made dense if the rule needs it.
      acceptance: name of the rule, see `acceptance.RULES`.
      no_repeat_ngram_size: n-grams of this size occur at most once in a text; 0 bars nothing.
      logprobs: number of alternatives with log-probabilities per emitted token; None keeps no
        log-probabilities.
    """

    llama: Llama
    drafter: Drafter
    tree: Tree
    acceptance: str = "greedy"
    no_repeat_ngram_size: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.rule.dense:
            object.__setattr__(self, "tree", self.tree.dense)
        if self.llama.taps != self.drafter.taps:
            tapped = self.llama.clone(taps=self.drafter.taps)
            object.__setattr__(self, "llama", tapped)

    @property
    def rule(self) -> Rule:
        """The acceptance rule."""
        return RULES[self.acceptance]

    @property
    def n_rows(self) -> int:
        """Rows of a verification pass, which need free slots: tree nodes and the drafter's extra rows."""
        return self.tree.n_nodes + (len(self.extra.extra_rows.depth_X) if self.extra else 0)

    @property
    def extra(self) -> WithExtraRows | None:
        """The drafter, if it has the backbone run extra rows."""
        return self.drafter if isinstance(self.drafter, WithExtraRows) else None

    @property
    def depth_only(self) -> "Engine":
        """The engine for reading prompts and growing caches.

        It keeps only the tree's depth and whether it copies, so that trees of the same depth share
        these compiled programs.
        """
        return replace(self, tree=stand_in([self.tree]))

    @property
    def keeps_text(self) -> bool:
        """Whether a state holds its texts, to bar n-grams or to copy from."""
        return bool(self.no_repeat_ngram_size or self.tree.copied_C.size)


class DecodeState(struct.PyTreeNode):
    """State of a batch being decoded; all arrays have static shapes.

    Attributes:
      cache: keys and values; slots [0, length) of a row are committed.
      drafter: the drafter's state.
      sampling: per-row sampling parameters.
      tokens_BO: emitted tokens; [0, n_new) of a row are valid.
      depth_BO: tree depth at which each was accepted; 0 for the verifier's tokens (the first token
        and the bonus tokens).
      n_new_B: tokens emitted so far, including the one from prefill.
      limit_B: most tokens the row may emit.
      max_steps_B: most decode steps it may take.
      stop_BQW: token sequences that end the row, see `stopping.pack_stops`.
      length_B: text positions in the cache, without the root.
      root_B: the last emitted token.
      status_B: RUNNING, STOPPED (EOS or stop sequence), LIMIT or PAUSED (`stopping`).
      steps_B: decode steps while the row was running.
      histogram_BL: numbers of steps that appended 1, 2, ..., L tokens.
      text_BS: prompt and emitted tokens by position, valid up to the root; None unless the engine
        keeps the text. S is the cache's slots plus a path.
      logprobs: log-probabilities of `tokens_BO`; None unless the engine keeps them.
    """

    cache: KVCache
    drafter: PyTree
    sampling: Sampling
    tokens_BO: jax.Array
    depth_BO: jax.Array
    n_new_B: jax.Array
    limit_B: jax.Array
    max_steps_B: jax.Array
    stop_BQW: jax.Array
    length_B: jax.Array
    root_B: jax.Array
    status_B: jax.Array
    steps_B: jax.Array
    histogram_BL: jax.Array
    text_BS: jax.Array | None = None
    logprobs: Logprobs | None = None


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
