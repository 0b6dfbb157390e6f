"""Biases and penalties, for greedy and sampled text: OpenAI's and transformers' definitions.

    z = logits + bias
    z = z / r if z > 0 else z r               tokens of prompt and text (`repetition_penalty`)
    z = z - frequency n - presence [n > 0]    a token that occurs n times in the generated text
    z = -infinity                             tokens that end the text, before its least length

Bias and repetition penalty in this order are transformers' `SequenceBiasLogitsProcessor` and
`RepetitionPenaltyLogitsProcessor`; OpenAI's API reference defines the subtracted terms. The text of a
tree node includes its path, so every node has its own counts and drafted text equals plain decoding's.
If no row has penalties, none are stored or computed (`Sampling.penalties` is None).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from medusa_jax.decoding.copies import Nodes


@dataclass(frozen=True)
class PenaltyOptions:
    """Biases and penalties of one request; the defaults change nothing.

    Attributes:
      presence, frequency: subtracted from the logits of tokens in the generated text: once, and once per
        occurrence.
      repetition: divides positive logits of tokens in prompt and text, multiplies negative ones.
      bias: pairs of a token and the number to add to its logit.
      least, ends: the tokens `ends` are barred until `least` others have been generated.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    least: int = 0
    ends: tuple[int, ...] = ()


class Penalties(struct.PyTreeNode):
    """Biases and penalties of every row, and the token counts of its text so far.

    Attributes:
      presence_B, frequency_B, repetition_B: as in `PenaltyOptions`.
      bias_BV: added to the logits.
      prompt_BV: whether a token occurs in the prompt.
      counts_BV: how often it occurs in the generated text, the root included.
      left_B: tokens to generate before those of `ends_BV` are allowed; 0 or less bars nothing.
      ends_BV: whether a token ends the text.
    """

    presence_B: jax.Array
    frequency_B: jax.Array
    repetition_B: jax.Array
    bias_BV: jax.Array
    prompt_BV: jax.Array
    counts_BV: jax.Array
    left_B: jax.Array
    ends_BV: jax.Array

    def at(self, columns: Callable[[jax.Array], jax.Array]) -> "Penalties":
        """The penalties of the tokens that `columns` picks from arrays [..., V].

        Each place's counts reach `penalise` separately.
        """
        return self.replace(
            bias_BV=columns(self.bias_BV),
            prompt_BV=columns(self.prompt_BV),
            counts_BV=columns(self.counts_BV),
            ends_BV=columns(self.ends_BV),
        )


def any_penalties(rows: Sequence[PenaltyOptions] | None) -> bool:
    """Whether any request has biases or penalties."""
    return rows is not None and any(row != PenaltyOptions() for row in rows)


def penalties_of(
    rows: Sequence[PenaltyOptions] | None, prompts: Sequence[Sequence[int]], vocab_size: int
) -> Penalties | None:
    """The penalties of a batch before its first token; None if no row has any."""
    if rows is None or not any_penalties(rows):
        return None
    shape = len(prompts), vocab_size
    bias_BV, prompt_BV = np.zeros(shape, np.float32), np.zeros(shape, bool)
    ends_BV = np.zeros(shape, bool)
    for row, (options, prompt) in enumerate(zip(rows, prompts)):
        prompt_BV[row, np.asarray(prompt, int)] = True
        for token, bias in options.bias:
            bias_BV[row, token] += bias
        ends_BV[row, list(options.ends)] = True

    def per_row(name: str) -> jax.Array:
        return jnp.array([getattr(options, name) for options in rows], jnp.float32)

    return Penalties(
        presence_B=per_row("presence"),
        frequency_B=per_row("frequency"),
        repetition_B=per_row("repetition"),
        bias_BV=jnp.asarray(bias_BV),
        prompt_BV=jnp.asarray(prompt_BV),
        counts_BV=jnp.zeros(shape, jnp.int32),
        left_B=jnp.array([options.least for options in rows], jnp.int32),
        ends_BV=jnp.asarray(ends_BV),
    )


def penalise(
    logits_BPV: jax.Array, penalties: Penalties, counts_BPV: jax.Array, depth_P: jax.Array
) -> jax.Array:
    """Apply biases and penalties to logits.

    Args:
      counts_BPV: how often each token occurs in the generated text at each place.
      depth_P: tokens of that text that `penalties` has not counted.

    Example: logits [1, -1, 0]; the text contains the last two tokens once; presence 0.5 and
    repetition 2: [1, -2.5, -0.5].
    """
    presence_B11, frequency_B11, repetition_B11 = (
        x[:, None, None].astype(logits_BPV.dtype)
        for x in (penalties.presence_B, penalties.frequency_B, penalties.repetition_B)
    )
    z_BPV = logits_BPV + penalties.bias_BV[:, None].astype(logits_BPV.dtype)
    scaled_BPV = jnp.where(z_BPV > 0, z_BPV / repetition_B11, z_BPV * repetition_B11)
    in_text_BPV = counts_BPV > 0
    z_BPV = jnp.where(penalties.prompt_BV[:, None] | in_text_BPV, scaled_BPV, z_BPV)
    z_BPV = z_BPV - frequency_B11 * counts_BPV.astype(z_BPV.dtype)
    z_BPV = z_BPV - jnp.where(in_text_BPV, presence_B11, 0)
    early_BP1 = (penalties.left_B[:, None] > depth_P[None])[..., None]
    return jnp.where(early_BP1 & penalties.ends_BV[:, None], -jnp.inf, z_BPV)


def counts_down_paths(counts_BV: jax.Array, nodes_BM: jax.Array, tree: Nodes) -> jax.Array:
    """How often every token occurs in the generated text up to each node: [B, M, V].

    Args:
      counts_BV: counts of the text up to the root, root included.

    Example: the tree of `Tree`'s docstring with tokens r x y z w: node 4 (path [0, 2]) counts x and
    w once more than the root.
    """
    B, M = nodes_BM.shape
    path_BML = jnp.take(nodes_BM, jnp.asarray(tree.ancestors_ML), axis=1)
    depth_L = jnp.arange(path_BML.shape[-1])[None, :]
    on_path_ML = (depth_L > 0) & (depth_L <= jnp.asarray(tree.depth_M)[:, None])
    row_B11, node_1M1 = jnp.arange(B)[:, None, None], jnp.arange(M)[None, :, None]
    counts_BMV = jnp.repeat(counts_BV[:, None], M, axis=1)
    weight_BML = jnp.broadcast_to(on_path_ML[None], path_BML.shape).astype(counts_BV.dtype)
    return counts_BMV.at[row_B11, node_1M1, path_BML].add(weight_BML)


def count(
    penalties: Penalties | None, emitted_BL: jax.Array, n_B: jax.Array
) -> Penalties | None:
    """The penalties after the first n emitted tokens of each row."""
    if penalties is None:
        return None
    valid_BL = jnp.arange(emitted_BL.shape[1])[None, :] < n_B[:, None]
    row_B1 = jnp.arange(emitted_BL.shape[0])[:, None]
    counts_BV = penalties.counts_BV
    counts_BV = counts_BV.at[row_B1, emitted_BL].add(valid_BL.astype(counts_BV.dtype))
    return penalties.replace(counts_BV=counts_BV, left_B=penalties.left_B - n_B)
