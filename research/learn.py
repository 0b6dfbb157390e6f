"""`python -m research learn`: what heads gain from a user's own answers.

A model answers prompts unlike the text that its heads were trained on (`learn_prompts.py`). The heads learn from the
answers as they come. Mean accepted lengths are replayed on later answers, and on those to a file's questions.
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
from medusa_jax.model import lora
from medusa_jax.model.kernels import PLAIN
from medusa_jax.notation import entries
from medusa_jax.programs import use_compilation_cache
from medusa_jax.sharding import Params
from medusa_jax.text.chat import encode_prompt
from medusa_jax.training.functions import HeadFunctions
from medusa_jax.tree.growth import replayed_tokens
from medusa_jax.whole_files import write_json
from research.learn_prompts import SHIFTS, questions
from research.replay import order_for

EXAMPLES = """examples:
  python -m research learn --model smollm2 --questions mt_bench.jsonl --drafter eagle
"""
# Answers held out, most tokens of a prompt and of an answer, nodes of the tree, none of them copied.
HELD_OUT, MOST_PROMPT, NEW, NODES = 30, 144, 112, 8
# Answers of a step, drawn from all so far; learning rates of additions and of all parameters.
BATCH, LR, LR_ALL = 4, 1e-3, 5e-4
CHAT = "chat"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """What heads gain from a user's own answers."""

    model: str = flag("as for decode.py", "smollm2")
    questions: str = flag("a question file, such as MT-bench's", metavar="FILE")
    drafter: str = flag("name or directory of heads", "eagle")
    shifts: str = flag("comma-separated", ",".join(SHIFTS))
    ranks: tuple[int, ...] = flag("0: all parameters", "8,0", type=numbers(least=0))
    points: tuple[int, ...] = flag("answers seen, ascending", "20,50,100", type=numbers())
    levels: int = flag("train.levels; 0: the recipe's loss", 0, type=at_least(0))
    steps: float = flag("steps after an answer, on average", 1.0)
    out: str = flag("directory for the model's answers", "work/learn")


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
        settings = recipe["config"]["train"] | {"dtype": "float32"}
        if flags.levels:  # cheaper steps
            settings |= {"levels": flags.levels, "induction_weight": 0.0}
        known = {field.name for field in dataclasses.fields(TrainConfig)} & settings.keys()
        train = TrainConfig(**{name: settings[name] for name in known})
        self._loss = HeadFunctions(self.model.drafter.heads, self.model.config, train).loss

    def states(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """The arguments of the loss after `frozen`: a row for each text, hidden states first."""
        N, T = len(texts), MOST_PROMPT + NEW
        tokens, segments = np.zeros((N, T), np.int32), np.zeros((N, T), np.int32)
        counted = np.zeros((N, T), bool)
        for n, (ids, n_prompt) in enumerate(texts):
            tokens[n, : len(ids)], segments[n, : len(ids)] = ids, 1
            counted[n, n_prompt : len(ids)] = True
        backbone = self.model.backbone.tapped(self.model.drafter.taps)
        forward = jax.jit(lambda backbone, *rows: backbone.forward(*rows))
        hidden = []
        for numbers_of, rows in equal_batches(N, ROWS):
            places = jnp.broadcast_to(jnp.arange(T), (len(rows), T))
            states = forward(backbone, tokens[rows], places, segments[rows])
            hidden.append(np.asarray(states, np.float32)[: len(numbers_of)])
        return [np.concatenate(hidden), tokens, counted, segments]

    def learn(self, texts: Sequence[Text], rank: int, flags: Flags) -> Iterator[Params]:
        """The parameters at each of `flags.points`, while the texts come one by one.

        Args:
          rank: of the addition to every kernel; 0: all parameters learn.
        """
        adam = optax.adam(LR if rank else LR_ALL)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
        untied, low_rank = LlamaConfig(tie_embeddings=False), LoraConfig(rank)

        def learnt(trained: Params, params: Params) -> Params:
            return lora.merge(untied, params, trained, low_rank)[1] if rank else trained

        def loss(trained: Params, params: Params, frozen: Params, batch: Any) -> jax.Array:
            return self._loss(learnt(trained, params), frozen, *batch)

        @jax.jit
        def step(trained: Params, opt: Any, params: Params, frozen: Params, batch: Any) -> Any:  # fmt: skip
            gradient = jax.grad(loss)(trained, params, frozen, batch)
            updates, opt = optimizer.update(gradient, opt, trained)
            return optax.apply_updates(trained, updates), opt

        trained = added(self.params, rank) if rank else self.params
        opt, arrays = optimizer.init(trained), self.states(texts)
        draw = np.random.default_rng(0)
        for n in range(1, len(texts) + 1):
            for _ in range(int(n * flags.steps) - int((n - 1) * flags.steps)):
                rows = draw.integers(0, n, BATCH)
                batch = [array[rows] for array in arrays]
                trained, opt = step(trained, opt, self.params, self.frozen, batch)
            if n in flags.points:
                yield learnt(trained, self.params)

    def replayed(self, params: Params, texts: Sequence[Text]) -> float:
        """Mean accepted length in a replay of these texts."""
        heads = params | {
            name: self.frozen[name] for name in self.frozen.keys() - {"backbone"}
        }
        self.model.variables = self.model.variables | {"heads": heads}
        return replayed_tokens(record(self.model, texts, Options()), self.tree)


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
            n = HELD_OUT if shift == CHAT else flags.points[-1] + HELD_OUT
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
    chat = learner.replayed(learner.params, texts[CHAT])
    for shift in entries(flags.shifts):
        seen, later = texts[shift][:last], texts[shift][last:]
        before = learner.replayed(learner.params, later)
        for rank in flags.ranks:
            lengths = [before]
            for params in learner.learn(seen, rank, flags):
                lengths.append(learner.replayed(params, later))
                inform(f"{shift}, rank {rank}: {lengths[-1] / before - 1:+.1%}")
            lengths += [chat, learner.replayed(params, texts[CHAT])]
            rows.append([shift, rank or "all", *(f"{x:.2f}" for x in lengths)])
    columns = ["shift", "rank", "before", *map(str, flags.points), "chat", "after"]
    print(markdown_table(columns, rows))
    return 0


main = Program("python -m research learn", Flags, run, EXAMPLES)
