"""`python -m research confidence`: would DSpark's confidences choose a tree for each step?

The chain of first guesses, its confidences and its probabilities are known before a step is verified.
A least-squares fit on half of the texts predicts from them the tokens that a step with each tree
emits; the other half is replayed with the tree that has the most predicted tokens for its time. The bound is
a choice that knows which guesses are right. Steps are timed on this device with the draft included, as
if the choice itself cost nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model
from medusa_jax.api.asking import equal_batches
from medusa_jax.commands.flags import Program, at_least, flag, numbers
from medusa_jax.commands.model_flags import (
    GenerationFlags,
    ModelFlags,
    generation_options,
    load_model,
)
from medusa_jax.console import inform, use_compilation_cache
from medusa_jax.decoding.generate import power_of_two
from medusa_jax.errors import UserError
from medusa_jax.evaluate.recording import ROWS, Text, own_texts, record
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.heads.dflash import DFlash
from medusa_jax.heads.drafter import Backbone, TextRows
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.sharding import Params
from medusa_jax.tree.growth import Recorded, growth_by_steps
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json, write_json
from research.asking import PromptFlags, first_prompts, questions_of
from research.timed_steps import step_seconds

EXAMPLES = """examples:
  python -m research confidence --drafter work/demo_dspark/export --limit 40
"""
# Text, position -> index of the tree of the step that starts there.
Choose = Callable[[int, int], int]


def chain_of_guesses(
    drafter: DFlash, params: Params, backbone: Backbone, tokens_BT: jax.Array, length_B: jax.Array
) -> jax.Array:  # fmt: skip
    """Confidence and probability of every first guess after each position: [B, T, K, 2]."""
    (B, T), D = tokens_BT.shape, drafter.llama.d_model
    position_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    segment_BT = (position_BT < length_B[:, None]).astype(jnp.int32)
    rows = (tokens_BT, position_BT, segment_BT)
    backbone = for_drafting(backbone, params).tapped(drafter.taps)
    text = TextRows(backbone.forward(*rows), *rows)
    features_KBTD = drafter.features(params, backbone, text)[..., :D]
    before_BT, found = jnp.roll(tokens_BT, -1, axis=1), []
    for k, own_BTD in enumerate(features_KBTD):
        after_BTR = drafter.after(params, backbone.llama.dtype, before_BT)
        given_BTE = jnp.concatenate([own_BTD, after_BTR], axis=-1)
        logits_BTO = drafter.head_logits(params, backbone, k, given_BTE)
        sure_BT = jax.nn.sigmoid(drafter.confidence(params, given_BTE))
        share_BT = jnp.max(jax.nn.softmax(logits_BTO, axis=-1), axis=-1)
        found.append(jnp.stack([sure_BT, share_BT], axis=-1))
        before_BT = jnp.argmax(logits_BTO, axis=-1)
        if not isinstance(backbone.scored, int):
            before_BT = backbone.scored[before_BT]
    return jnp.stack(found, axis=2)


def signals(model: Model, texts: Sequence[Text], counts: Sequence[int]) -> list[np.ndarray]:
    """`chain_of_guesses` at the first `counts` positions of each answer where a step may begin."""
    compiled = jax.jit(chain_of_guesses, static_argnames="drafter")
    found = [np.zeros(0)] * len(texts)
    for own, rows in equal_batches(len(texts), ROWS):
        length_B = np.array([len(texts[i].ids) for i in rows], np.int32)
        tokens_BT = np.zeros((len(rows), power_of_two(int(length_B.max()), 64)), np.int32)
        for row, i in zip(tokens_BT, rows):
            row[: len(texts[i].ids)] = texts[i].ids
        given = model.variables["heads"], model.backbone, tokens_BT, length_B
        signal_BTK2 = np.asarray(compiled(model.drafter, *given))
        for b, i in enumerate(own):
            first = texts[i].n_prompt - 1
            found[i] = signal_BTK2[b, first : first + counts[i]]
    return found


def gains(ranks_PK: np.ndarray, trees: Sequence[Tree]) -> np.ndarray:
    """Tokens of a step with each tree that starts at each position: [P, N].

    Example: ranks (0, 2) and the trees {} and {(0,), (0, 1)} give 1 and 2.
    """
    nodes = [set(tree.choices) for tree in trees]
    paths = [[tuple(row[:k]) for k in range(1, len(row) + 1)] for row in ranks_PK.tolist()]
    # A tree with a node has its ancestors.
    return np.array([[1 + sum(p in n for p in row) for n in nodes] for row in paths])


def known_before(signal_PK: np.ndarray) -> np.ndarray:
    """Inputs of the fit: one, the signal of each depth, products along the chain and their squares."""
    along_PK = np.cumprod(signal_PK, axis=1)
    ones_P1 = np.ones((len(signal_PK), 1))
    return np.concatenate([ones_P1, signal_PK, along_PK, along_PK**2], axis=1)


def speed(
    gain: Sequence[np.ndarray], cost_N: np.ndarray, choose: Choose, texts: range
) -> float:
    """Tokens per time of a replay, each step with the chosen tree."""
    tokens = time = 0.0
    for i in texts:
        at = 0
        while at < len(gain[i]):
            tree = choose(i, at)
            taken = min(int(gain[i][at, tree]), len(gain[i]) - at)
            tokens, time, at = tokens + taken, time + cost_N[tree], at + taken
    return tokens / time


def fastest(
    gain: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    cost_N: np.ndarray,
    fit: range,
) -> Choose:
    """Choose the tree with the largest excess of expected tokens over the time's worth.

    A unit of time is worth the tokens per time that this choice itself reaches on `fit`
    (Dinkelbach's iteration).
    """
    worth = 1.0

    def choose(i: int, at: int) -> int:
        return int(np.argmax(expected[i][at] - worth * cost_N))

    for _ in range(8):
        worth = speed(gain, cost_N, choose, fit)
    return choose


def compare(
    gain: Sequence[np.ndarray], signal: Sequence[np.ndarray], cost_N: np.ndarray
) -> dict[str, float]:
    """Tokens per plain step's time on the second half of the texts, fitted on the first."""
    fit, held = range(len(gain) // 2), range(len(gain) // 2, len(gain))

    def always(n: int) -> Choose:
        return lambda i, at: n

    best = int(np.argmax([speed(gain, cost_N, always(n), fit) for n in range(len(cost_N))]))
    found = {"one tree": speed(gain, cost_N, always(best), held)}
    for name, kind in (("confidences", 0), ("probabilities", 1)):
        inputs = [known_before(own[..., kind]) for own in signal]
        outcome = np.concatenate([gain[i] for i in fit])
        fitted = np.linalg.lstsq(np.concatenate([inputs[i] for i in fit]), outcome)[0]
        expected = [own @ fitted for own in inputs]
        found[name] = speed(gain, cost_N, fastest(gain, expected, cost_N, fit), held)
    found["bound"] = speed(gain, cost_N, fastest(gain, gain, cost_N, held), held)
    return found


def separates(signal_P: np.ndarray, right_P: np.ndarray) -> float:
    """Probability that a right guess has a larger signal than a wrong one (area under the curve)."""
    rank_P = np.empty(len(signal_P))
    rank_P[np.argsort(signal_P)] = np.arange(len(signal_P))
    n = int(right_P.sum())
    return float((rank_P[right_P].sum() - n * (n - 1) / 2) / (n * (len(right_P) - n)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(PromptFlags, GenerationFlags, ModelFlags):
    """Choose the tree of a step by the confidence in its guesses."""

    sizes: tuple[int, ...] = flag(
        "of trees", "1,2,3,4,5,6,8,12,16,32,64", type=numbers(least=1)
    )
    rounds: int = flag("timed rounds", 7, type=at_least(1))
    out: str = flag("directory for results", "work/confidence")


def run(flags: Flags) -> int:
    """Record, time, replay, print the table."""
    use_compilation_cache()
    model = load_model(flags, needs_heads=True, tree="none")
    drafter, options = model.drafter, generation_options(flags)
    if not isinstance(drafter, DFlash) or not drafter.heads.confidence:
        raise UserError(f"{drafter.name} heads here have no confidence (heads.confidence)")
    questions = questions_of(flags, flags.model)
    prompts = first_prompts(flags, model, questions, flags.max_new_tokens)
    texts = own_texts(model, prompts, options)
    recorded = [Recorded.of_heads(one.ranks_PK) for one in record(model, texts, options)]
    half = len(texts) // 2
    growth = growth_by_steps(recorded[:half], max(flags.sizes) - 1)
    trees = [
        Tree.from_choices(growth[: n - 1]) for n in flags.sizes if n <= len(growth) + 1
    ]
    seconds = step_seconds(
        model, trees, prompts[0], rounds=flags.rounds, temperature=options.temperature
    )
    cost_N = np.array(seconds) / seconds[0]
    signal = signals(model, texts, [len(one.ranks_PK) for one in recorded])
    right_P = np.concatenate([one.ranks_PK[:, 0] == 0 for one in recorded])
    first_P2 = np.concatenate([own[:, 0] for own in signal])
    found: Json = {
        "steps": {str(t.n_nodes): float(c) for t, c in zip(trees, cost_N)},
        "first_guess_right": float(right_P.mean()),
        "separates": [separates(first_P2[:, kind], right_P) for kind in (0, 1)],
        "speed": compare([gains(one.ranks_PK, trees) for one in recorded], signal, cost_N),
    }
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "confidence.json", found)
    base = found["speed"]["one tree"]
    rows = [
        [name, f"{x:.3f}", f"{x / base - 1:+.1%}"] for name, x in found["speed"].items()
    ]
    print(markdown_table(["tree of a step chosen by", "tokens per plain step", ""], rows))
    sure, share = found["separates"]
    inform(
        f"right first guesses {right_P.mean():.1%}; a right one has the larger confidence with probability "
        f"{sure:.3f}, the larger probability with {share:.3f}; wrote {out}/confidence.json"
    )
    return 0


main = Program("python -m research confidence", Flags, run, EXAMPLES)
