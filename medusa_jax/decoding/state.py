"""What decoding knows: the engine, fixed when it is compiled, and the state of the rows in flight."""

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import struct

from medusa_jax.decoding.acceptance import RULES, Rule
from medusa_jax.decoding.logprobs import Logprobs
from medusa_jax.decoding.sampling import Sampling
from medusa_jax.heads.drafter import Drafter
from medusa_jax.model.cache import KVCache
from medusa_jax.model.llama import Llama
from medusa_jax.tree import Tree, stand_in


@dataclass(frozen=True)
class Engine:
    """Everything about decoding that is fixed at compile time (a static argument of jit).

    Attributes:
      llama: the backbone, for prepared (fused) parameters.
      drafter: the draft heads.
      tree: the draft tree; the empty one is autoregressive decoding.
      acceptance: name of the rule, see `acceptance.RULES`; one that needs it makes the tree dense.
      no_repeat_ngram_size: n-grams of this size stand in a text at most once; 0 bars nothing.
      logprobs: alternatives whose log-probabilities are kept beside each emitted token's; None
        keeps none at all.
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

    @property
    def rule(self) -> Rule:
        """The acceptance rule."""
        return RULES[self.acceptance]

    @property
    def n_rows(self) -> int:
        """What a step verifies and needs free slots for: the tree, and what is beside it."""
        beside = self.drafter.beside
        return self.tree.n_nodes + (len(beside.depth_X) if beside else 0)

    @property
    def depth_only(self) -> "Engine":
        """The engine as it reads prompts and grows caches: of the tree it knows the depth and
        whether it copies, so that trees of one depth share these programs."""
        return replace(self, tree=stand_in([self.tree]))

    @property
    def keeps_text(self) -> bool:
        """Whether a state holds the tokens of its texts: to bar n-grams, or to copy from."""
        return bool(self.no_repeat_ngram_size or self.tree.copied_C.size)


class DecodeState(struct.PyTreeNode):
    """One batch of rows in flight; every array is static in shape.

    Attributes:
      cache: keys and values; slots [0, length) of a row are committed.
      drafter: the drafter's own state.
      sampling: per-row sampling parameters.
      tokens_BO: emitted tokens; [0, n_new) of a row count.
      depth_BO: for each of them the tree depth it was accepted at, 0 where the verifier chose
        it itself (the first token and the bonus tokens).
      n_new_B: tokens emitted so far, the one from prefill included.
      limit_B: most tokens the row may emit.
      max_steps_B: most decode steps it may take.
      stop_BQW: token sequences that end the row, see `stopping.pack_stops`.
      length_B: text positions in the cache; the root is not in it yet.
      root_B: the last emitted token.
      status_B: RUNNING, STOPPED (EOS or stop sequence), LIMIT or PAUSED (`stopping`).
      steps_B: decode steps the row took part in.
      histogram_BL: steps that appended 1, 2, ..., L tokens.
      text_BS: prompt and emitted tokens at their positions, the root the last that counts;
        None unless the engine keeps it. S leaves room for a path behind the cache's slots.
      logprobs: those of `tokens_BO`; None unless the engine keeps them.
    """

    cache: KVCache
    drafter: Any
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
    """What the host may look at while the next loop runs: copies, never donated."""

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


def text_slots(engine: Engine, slots: int) -> int:
    """Room for the text: what the cache holds, the root, and a whole path behind it."""
    return slots + engine.tree.path_length
