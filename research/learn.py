"""`python -m research learn`: what heads gain from a user's own answers.

A model answers prompts unlike the text that its heads were trained on (`learn_prompts.py`). The heads learn from the
answers as they come, with a sample of the text of their training in every step (`python -m research rehearsal`), and
the mean of what they learnt is used. Mean accepted lengths are replayed on later answers, and on those to a file's
questions.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from medusa_jax.api import Model, Options, load
from medusa_jax.api.bundles import find_heads
from medusa_jax.api.prompts import ending_turns, equal_batches
from medusa_jax.arch import LlamaConfig
from medusa_jax.commands.flags import Program, at_least, flag, numbers
from medusa_jax.config import LoraConfig, TrainConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError, one_of
from medusa_jax.evaluate.question_files import read_questions
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.evaluate.text_ranks import ROWS, Text, answer_prompts, record
from medusa_jax.heads import vocabulary
from medusa_jax.heads.optional import SupportsLevels
from medusa_jax.learning.rule import LEVELS
from medusa_jax.model import lora
from medusa_jax.model.kernels import PLAIN
from medusa_jax.notation import entries
from medusa_jax.programs import use_compilation_cache
from medusa_jax.sharding import Params
from medusa_jax.text.chat import encode_prompt
from medusa_jax.training.functions import HeadFunctions
from medusa_jax.tree.growth import replay
from medusa_jax.whole_files import write_json
from research.learn_prompts import SHIFTS, questions
from research.replay import order_for

EXAMPLES = """examples:
  python -m research rehearsal --out rehearsal.npz
  python -m research learn --model smollm2 --questions mt_bench.jsonl --rehearsal rehearsal.npz
"""
# Answers held out, most tokens of a prompt and of an answer, nodes of the tree, none of them copied.
HELD_OUT, MOST_PROMPT, NEW, NODES = 28, 144, 112, 8
CHATS = 64
# Rows of a step: answers, drawn from all so far, and rehearsed texts. Rank and rate of the addition, decay of its mean.
ANSWERS, REHEARSED, RANK, LR, DECAY, WARM_UP = 4, 4, 8, 1e-3, 0.98, 10
CHAT = "chat"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """What heads gain from a user's own answers."""

    model: str = flag("as for decode.py", "smollm2")
    questions: str = flag("a question file, such as MT-bench's", metavar="FILE")
    drafter: str = flag("name or directory of heads", "eagle")
    shifts: str = flag("comma-separated", ",".join(SHIFTS))
    rehearsal: str = flag("file of `rehearsal`; empty: learn the answers alone", "")
    points: tuple[int, ...] = flag("answers seen, ascending", "20,50,100", type=numbers())
    steps: int = flag("steps after an answer", 2, type=at_least(0))
    out: str = flag("directory for the model's answers", "work/learn")


# Tokens of a text, and which of them are learned.
Row = tuple[Sequence[int] | np.ndarray, np.ndarray]


def read_rows(file: str) -> list[Row]:
    """The texts of a file that `rehearsal` wrote."""
    with np.load(file, allow_pickle=False) as saved:
        ends = np.cumsum(saved["lengths"], dtype=int)[:-1]
        columns = (np.split(saved[name], ends) for name in ("tokens", "counted"))
        return list(zip(*columns))


class Learner:
    """The heads of a model in float32, and how they learn.

    Attributes:
      params: their parameters, without the draft vocabulary.
      frozen: what their loss reads besides.
    """

    def __init__(self, flags: Flags) -> None:
        self.model = load(flags.model, flags.drafter, weights="float32", kernels=PLAIN)
        self.tree = order_for(self.model, (), Options(), copies=False).tree(NODES)
        self.params = dict(self.model.variables["heads"])
        self.frozen: Params = {"backbone": self.model.variables["backbone"]}
        if vocabulary.GROUP in self.params:
            self.frozen[vocabulary.GROUP] = self.params.pop(vocabulary.GROUP)
        stored = find_heads(flags.model, flags.drafter)
        recipe = stored.meta.get("recipe", {}) if stored else {}
        if "config" not in recipe:
            raise UserError(f"{flags.drafter}: no heads.json says how they were trained")
        levels = LEVELS if isinstance(self.model.drafter, SupportsLevels) else 1
        own = {"dtype": "float32", "levels": levels, "induction_weight": 0.0}
        settings = recipe["config"]["train"] | own
        known = {field.name for field in dataclasses.fields(TrainConfig)} & settings.keys()
        train = TrainConfig(**{name: settings[name] for name in known})
        self._loss = HeadFunctions(self.model.drafter.heads, self.model.config, train).loss

    def states(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """The arguments of the loss after `frozen`: a row for each text, hidden states first."""
        N, T = len(rows), MOST_PROMPT + NEW
        tokens, segments = np.zeros((N, T), np.int32), np.zeros((N, T), np.int32)
        counted = np.zeros((N, T), bool)
        for n, (ids, learned) in enumerate(rows):
            end = min(len(ids), T)
            tokens[n, :end], counted[n, :end], segments[n, :end] = (
                ids[:end],
                learned[:end],
                1,
            )
        backbone = self.model.backbone.tapped(self.model.drafter.taps)
        forward = jax.jit(lambda backbone, *rows: backbone.forward(*rows))
        hidden = []
        for numbers_of, batch in equal_batches(N, ROWS):
            places = jnp.broadcast_to(jnp.arange(T), (len(batch), T))
            states = forward(backbone, tokens[batch], places, segments[batch])
            hidden.append(np.asarray(states, np.float32)[: len(numbers_of)])
        return [np.concatenate(hidden), tokens, counted, segments]

    def learn(
        self, texts: Sequence[Text], rehearsed: Sequence[Row], flags: Flags
    ) -> Iterator[Params]:
        """The parameters with the addition's mean, at each of `flags.points`, while the texts come one by one."""
        rate = optax.linear_schedule(0.0, LR, WARM_UP)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        untied, low_rank = LlamaConfig(tie_embeddings=False), LoraConfig(RANK)

        def learnt(addition: Params, params: Params) -> Params:
            return lora.merge(untied, params, addition, low_rank)[1]

        def loss(addition: Params, params: Params, frozen: Params, batch: Any) -> jax.Array:
            return self._loss(learnt(addition, params), frozen, *batch)

        @jax.jit
        def step(addition: Params, mean: Params, opt: Any, k: int, params: Params, frozen: Params, batch: Any) -> Any:  # fmt: skip
            gradient = jax.grad(loss)(addition, params, frozen, batch)
            updates, opt = optimizer.update(gradient, opt, addition)
            addition = optax.apply_updates(addition, updates)
            share = 1 - jnp.minimum(DECAY, k / (k + WARM_UP))
            return addition, optax.incremental_update(addition, mean, share), opt

        addition = mean = added(self.params, RANK)
        opt, draw, k = optimizer.init(addition), np.random.default_rng(0), 0
        answers = self.states(
            [(text.ids, np.arange(len(text.ids)) >= text.n_prompt) for text in texts]
        )
        others = self.states(rehearsed) if rehearsed else []
        for n in range(1, len(texts) + 1):
            for _ in range(flags.steps):
                rows = draw.integers(0, n, ANSWERS)
                batch = [array[rows] for array in answers]
                if rehearsed:
                    rows = draw.integers(0, len(rehearsed), REHEARSED)
                    pairs = zip(batch, others)
                    batch = [np.concatenate([own, array[rows]]) for own, array in pairs]
                addition, mean, opt = step(
                    addition, mean, opt, k, self.params, self.frozen, batch
                )
                k += 1
            if n in flags.points:
                yield learnt(mean, self.params)

    def replayed(self, params: Params, texts: Sequence[Text]) -> np.ndarray:
        """Tokens and steps of a replay of each text [N, 2]."""
        heads = params | {
            name: self.frozen[name] for name in self.frozen.keys() - {"backbone"}
        }
        self.model.variables = self.model.variables | {"heads": heads}
        recorded = record(self.model, texts, Options())
        return np.array([replay([text], self.tree) for text in recorded])


def change(before_N2: np.ndarray, after_N2: np.ndarray) -> str:
    """Of the mean accepted length, and its standard error over texts (200 resamples)."""

    def of(rows: Any) -> float:
        (tokens, steps), (tokens_now, steps_now) = (
            counts[rows].sum(axis=0) for counts in (before_N2, after_N2)
        )
        return float(tokens_now / steps_now / (tokens / steps) - 1)

    draw, n = np.random.default_rng(0), len(before_N2)
    error = np.std([of(draw.integers(0, n, n)) for _ in range(200)])
    return f"{of(slice(None)):+.1%} ± {error:.1%}"


def added(params: Params, rank: int) -> Params:
    """A fresh addition to every kernel, A at random and B zero."""
    key, factors = jax.random.key(0), {}
    for i, (path, leaf) in enumerate(flatten_dict(params).items()):
        if path[-1] == "kernel":
            n_in, n_out = leaf.shape
            a = jax.random.uniform(jax.random.fold_in(key, i), (n_in, rank), minval=-1)
            factors[*path[:-1], "a"] = a * n_in**-0.5
            factors[*path[:-1], "b"] = jnp.zeros((rank, n_out))
    return unflatten_dict(factors)  # type: ignore[no-any-return]


def answers(flags: Flags, model: Model) -> dict[str, list[Text]]:
    """The model's greedy answers by shift, and to the questions; kept in texts.json for the next call."""
    file = Path(flags.out) / "texts.json"
    saved = json.loads(file.read_text()) if file.exists() else {}
    options = Options(max_new_tokens=NEW)
    options = ending_turns(model.tokenizer, model.eos_ids, options, "")
    for shift in (*entries(flags.shifts), CHAT):
        if shift not in saved:
            n = CHATS if shift == CHAT else flags.points[-1] + HELD_OUT
            if shift == CHAT:
                asked = [one["turns"][0] for one in read_questions(flags.questions)]
            else:
                asked = questions(shift, 2 * n)
            ids = [encode_prompt(model.tokenizer, text) for text in asked]
            ids = [prompt for prompt in ids if len(prompt) <= MOST_PROMPT][:n]
            inform(f"{shift}: answering {len(ids)} prompts")
            saved[shift] = answer_prompts(model, ids, options)
            write_json(file, saved, indent=None)
    return {shift: [Text(*fields) for fields in texts] for shift, texts in saved.items()}


def run(flags: Flags) -> int:
    """Answer, learn from every shift in each way, and print the curves."""
    for shift in entries(flags.shifts):
        one_of("--shifts", shift, SHIFTS)
    use_compilation_cache()
    Path(flags.out).mkdir(parents=True, exist_ok=True)
    last, rows = flags.points[-1], []
    learner = Learner(flags)
    texts = answers(flags, learner.model)
    rehearsed = read_rows(flags.rehearsal) if flags.rehearsal else []
    chat = learner.replayed(learner.params, texts[CHAT])
    for shift in entries(flags.shifts):
        seen, later = texts[shift][:last], texts[shift][last:]
        before = learner.replayed(learner.params, later)
        tokens, steps = before.sum(axis=0)
        row = [shift, f"{tokens / steps:.2f}"]
        for params in learner.learn(seen, rehearsed, flags):
            row.append(change(before, learner.replayed(params, later)))
            inform(f"{shift}: {row[-1]}")
        rows.append([*row, change(chat, learner.replayed(params, texts[CHAT]))])
    columns = ["shift", "before", *map(str, flags.points), CHAT]
    print(markdown_table(columns, rows))
    return 0


main = Program("python -m research learn", Flags, run, EXAMPLES)
