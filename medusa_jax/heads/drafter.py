"""The contract between drafters and the rest of the package.

A drafter is a small immutable object with pure methods; its parameters and state are pytrees
that the caller carries. The decode loop, the trainer and the calibrator use only this interface.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params, PyTree
from medusa_jax.tree.tree import Tree


class Ranked(NamedTuple):
    """The guesses of one depth, to be ranked by score.

    Both arrays are [B, O] if all parents share the guesses, else [B, P, O] with one row for each node
    of the depth above that has children, in the order of the nodes.

    Attributes:
      logits: logits of the guesses, with the request's n-gram bars, biases and penalties.
      scores: rank the guesses: the logits, plus the noise of their position in sampled decoding.
    """

    logits: jax.Array
    scores: jax.Array


class Proposal(NamedTuple):
    """A filled tree, the result of `Drafter.propose`.

    Attributes:
      nodes_BM: token ids of all nodes, the root first.
      ranked: the guesses by depth. Rejection sampling reads them; other rules do not.
    """

    nodes_BM: jax.Array
    ranked: tuple[Ranked, ...] = ()


class Committed(NamedTuple):
    """Newly accepted positions, the input of `Drafter.commit`: T candidates, the first n are valid.

    Attributes:
      hidden_BTE: the backbone's hidden states, then the streams of `Drafter.taps`: E = (1 + A) D.
      tokens_BT: the tokens at these positions.
      next_tokens_BT: the tokens after them; the last valid one is the new root.
      positions_BT: absolute positions.
      n_B: number of valid candidates, 0 to T; 0 leaves the state of that row unchanged.
    """

    hidden_BTE: jax.Array
    tokens_BT: jax.Array
    next_tokens_BT: jax.Array
    positions_BT: jax.Array
    n_B: jax.Array


class TextRows(NamedTuple):
    """Whole rows of known text, the input of `Drafter.features`.

    Attributes:
      hidden_BTE: the backbone's hidden states, then the streams of `Drafter.taps`.
      tokens_BT, positions_BT: the tokens and their positions in their segment.
      segment_ids_BT: a different number for each text packed into a row; 0 is padding.
      dropout_key: turns dropout on.
    """

    hidden_BTE: jax.Array
    tokens_BT: jax.Array
    positions_BT: jax.Array
    segment_ids_BT: jax.Array
    dropout_key: jax.Array | None = None


def shift_left(x: jax.Array, by: int) -> jax.Array:
    """Shift x [B, T, ...] left by `by` positions, with zeros at the end: [a b c], 1 -> [b c 0]."""
    shifted = x[:, by:]
    pad = ((0, 0), (0, x.shape[1] - shifted.shape[1])) + ((0, 0),) * (x.ndim - 2)
    return jnp.pad(shifted, pad)


class DraftRequest(NamedTuple):
    """A request to draft for one step, the input of `Drafter.propose`.

    Attributes:
      root_B: the last token of each text.
      tree: the nodes to fill.
      rank: (depth, logits) -> the guesses of that depth as `Ranked`.
    """

    root_B: jax.Array
    tree: Tree
    rank: Callable[[int, jax.Array], Ranked]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Base class of all drafters. Hashable: a static argument of `jax.jit`.

    A new drafter is one subclass, in this package or any other: `registry.py` finds it by name, by entry
    point or as `module:Class` (docs/write_a_drafter.md). Parameters of head k are under "heads_{k}", its
    hidden layers there under "layers_{j}"; other entries may have any name except "draft_vocab". What only
    some families can do is in `optional.py`.

    With a draft vocabulary, `init`, `head_logits` and `propose` get a backbone whose LM head scores
    only its O tokens: logits are [..., O], and `best_tokens` maps them back to token ids.

    Attributes:
      heads: the kind and sizes of the heads.
      llama: the shape of their backbone.
      Config: configuration class, with the fields that only this drafter has.
      least_layers: minimum number of hidden layers of a head.
      separable: the first heads also work alone, so the others need not be loaded.
      trained: it has heads, which are trained and stored in files; otherwise it needs neither `init` nor `features`.
    """

    heads: HeadsConfig
    llama: LlamaConfig

    Config: ClassVar[type[HeadsConfig]] = HeadsConfig
    least_layers: ClassVar[int] = 1
    separable: ClassVar[bool] = True
    trained: ClassVar[bool] = True

    def check(self) -> None:
        """Refuse invalid fields.

        Raises:
          UserError: names the field.
        """

    @property
    def name(self) -> str:
        """The drafter's name in configurations and files."""
        return self.heads.drafter

    @property
    def n_heads(self) -> int:
        """K. Head k (0-based) at position t guesses the token at t + k + 2."""
        return self.heads.n_heads

    @property
    def stored_counts(self) -> tuple[int, int]:
        """Number of heads with separate parameters, and number of separate layers in each.

        Parameters that all heads share are those of "heads_0": (1, layers).
        """
        return self.heads.n_heads, self.heads.n_layers

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the backbone whose input the drafter reads, from 0 to the number of layers."""
        return ()

    @property
    def default_tree(self) -> Tree:
        """The tree to use if none is calibrated and none is given."""
        return Tree.chain(self.n_heads)

    def check_tree(self, tree: Tree) -> None:
        """Refuse a tree that cannot be drafted.

        Raises:
          UserError: says why.
        """
        tree.check_depth(self.n_heads)

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """Fresh float32 parameters.

        Raises:
          UserError: the drafter has none.
        """
        raise UserError(f"{self.name} has no heads to train or to load")

    # Training and calibration: teacher-forced over whole rows.

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        """Inputs of the heads' LM heads at every position: [K, B, T, D].

        Row t of head k may depend on hidden states up to t and on tokens up to t + k + 1, and must
        equal what `propose` computes when those tokens have been accepted or drafted.

        Raises:
          UserError: the drafter has none.
        """
        raise UserError(
            f"{self.name} has no heads to fit a tree to: choose a tree with --tree"
        )

    def head_logits(
        self, params: Params, backbone: Backbone, k: int, features: jax.Array
    ) -> jax.Array:
        """Logits [..., O] of head k (0-based, static) from its features [..., D].

        In training `params` has only `head_params`, and the backbone only the LM head that heads may share.
        """
        raise NotImplementedError

    @property
    def head_entries(self) -> tuple[str, ...]:
        """Names of the parameters of a head that `head_logits` reads."""
        return ("lm_head",)

    def head_params(self, params: Params, k: int) -> Params:
        """The part of `params` that `head_logits` of head k reads."""
        name = f"heads_{min(k, self.stored_counts[0] - 1)}"
        entries = self.head_entries
        return {name: {key: params[name][key] for key in params[name] if key in entries}}

    # Decoding.

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> PyTree:
        """The state before any text: a pytree of arrays, with `slots` slots per row in a `PositionState`."""
        raise NotImplementedError

    def commit(
        self, params: Params, backbone: Backbone, state: PyTree, new: Committed
    ) -> PyTree:
        """The state after newly accepted positions."""
        raise NotImplementedError

    def propose(
        self, params: Params, backbone: Backbone, state: PyTree, request: DraftRequest
    ) -> Proposal:
        """Fill the tree. Heads beyond the tree's depth are not computed."""
        raise NotImplementedError


class NoDrafter(Drafter):
    """The drafter of plain decoding: no parameters, no layers, no state.

    It leaves the state of any other drafter unchanged.
    """

    @property
    def default_tree(self) -> Tree:
        return Tree.none()

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> tuple[()]:
        return ()

    def commit(
        self, params: Params, backbone: Backbone, state: PyTree, new: Committed
    ) -> PyTree:
        return state

    def propose(
        self, params: Params, backbone: Backbone, state: PyTree, request: DraftRequest
    ) -> Proposal:
        return Proposal(request.root_B[:, None])
