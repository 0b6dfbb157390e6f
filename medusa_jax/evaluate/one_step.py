"""The intermediate results of one decode step, on the host."""

from collections.abc import Sequence

import jax
import numpy as np

from medusa_jax.api.model import Model
from medusa_jax.api.results import Options
from medusa_jax.decoding import generation
from medusa_jax.decoding import step as parts
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.sampling import filtered, gumbel
from medusa_jax.decoding.state import DecodeState
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.errors import UserError
from medusa_jax.sharding import Params
from medusa_jax.whole_files import Json


def take_steps(
    model: Model, prompt: str, n: int, temperature: float = 0.0, seed: int = 0
) -> Json:
    """Decode n - 1 steps, then run the n-th part by part.

    Returns: NumPy values of that step: nodes, positions, targets, each [M]; scores [M, V], adjusted logits / T + g
      (T = 0: adjusted logits) after each node, whose argmax is its target; path (node numbers) with its length n; emitted;
      length and root before and after; text and n_new before.

    Raises:
      UserError: the text ends before that step.
    """
    engine = model.engine(sampled=temperature > 0)
    n_tokens = n * engine.tree.path_length
    options = Options(max_new_tokens=n_tokens, temperature=temperature, seed=seed)
    request = model.request([prompt], [options])
    state, sizes = generation.begin(engine, model.variables, request)
    if len(sizes) > 1:  # room for all steps, since a loop stops when its cache is full
        state = generation.grow(engine.depth_only, sizes[-1], state)
    state, _ = decode_loop(engine, model.variables, state, np.int32(n - 1))

    @jax.jit
    def one(variables: Params, state: DecodeState) -> Json:
        drafts = parts.draft(engine, variables, state, engine.tree.fixed)
        verified = parts.verify(engine, variables, state, drafts)
        _, logits_BMV = parts.adjusted(engine, variables, state, verified)
        scores_MV = logits_BMV[0]
        if temperature > 0:
            after_BM, V = verified.positions_BM + 1, logits_BMV.shape[-1]
            noise_BMV = gumbel(state.sampling.key_B, after_BM, V, logits_BMV.dtype)
            scores_MV = (filtered(engine.kernels, logits_BMV, state.sampling) + noise_BMV)[
                0
            ]
        outcome = parts.accept(engine, variables, state, verified)
        next_state = parts.commit(engine, variables, state, verified, outcome)
        return {
            "nodes": drafts.nodes_BM[0],
            "positions": verified.positions_BM[0],
            "scores": scores_MV,
            "targets": scores_MV.argmax(-1),
            "path": outcome.path_BL[0],
            "n": outcome.n_B[0],
            "emitted": outcome.emitted_BL[0],
            "length": (state.length_B[0], next_state.length_B[0]),
            "root": (state.root_B[0], next_state.root_B[0]),
            "text": state.tokens_BO[0],
            "n_new": state.n_new_B[0],
            "running": state.status_B[0] == RUNNING,
        }

    step = jax.tree.map(np.asarray, one(model.variables, state))
    if not step["running"]:
        raise UserError(f"the text ends before step {n}: ask for an earlier --step")
    return step


def token_labels(model: Model, ids: Sequence[int]) -> list[str]:
    """Tokens as labels for pictures, with visible line breaks and blanks."""
    texts = (model.tokenizer.decode([int(i)]) for i in ids)
    return [
        text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace(
            " ", "\N{MIDDLE DOT}"
        )
        for text in texts
    ]
