"""Answer seeds batch by batch; every answer is on disk soon after its end."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medusa_jax import hosts
from medusa_jax.distill.conversation import Take, Turn, continuation, converse, talk
from medusa_jax.distill.seeds import Seed
from medusa_jax.errors import Terminated
from medusa_jax.progress import ProgressBar
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api.model import Model
    from medusa_jax.api.results import Options


@dataclasses.dataclass
class Writer:
    """Answers seeds in batches of one shape, so that decoding is compiled once.

    Attributes:
      options, user_options: of answers, and of user turns that the model writes.
      chat_template, max_turns: as for `conversation.talk`.
      tokens, seconds: new tokens of finished decode calls, and the time without compilation.
    """

    model: "Model"
    mode: str
    options: "Options"
    user_options: "Options"
    batch_size: int
    chat_template: str
    max_turns: int
    progress: ProgressBar
    tokens: int = 0
    seconds: float = 0.0

    def decode(self, turns: list[Turn], numbers: list[int], take: Take) -> None:
        """Decode a batch of turns, padded to `batch_size`. Draws depend only on each seed's number.

        Args:
          take: called with the index and the result of each turn.
        """
        n, options = len(turns), self.options
        if turns[0].stop is not None:
            options = self.user_options
        rows = [
            dataclasses.replace(
                options, seed=options.seed + number, stop=(turn.stop,) if turn.stop else ()
            )
            for turn, number in zip(turns, numbers)
        ]
        prompts = [turn.prompt for turn in turns]
        prompts += [prompts[-1]] * (self.batch_size - n)
        rows += [rows[-1]] * (self.batch_size - n)
        # One tree throughout: a resumed run writes the same text even where scores are tied.
        tree = self.model.tree_at(len(prompts))
        self.progress.update(0, "compiling (once for each size of the texts)")
        self.progress.began += self.model.compile(prompts, rows, tree=tree)
        self.progress.update(0, "reading the prompts")
        start, spent, done = time.perf_counter(), self.seconds, self.progress.done

        def watch(n_new_B: np.ndarray) -> None:
            self.seconds = spent + time.perf_counter() - start
            current = int(n_new_B[:n].sum())
            ended = self.progress.done - done
            self.progress.unfinished = max(current / options.max_new_tokens - ended, 0.0)
            self.show(current)

        results = self.model.generate(
            prompts,
            rows,
            tree=tree,
            ids=[0] * len(rows),  # a draw must not depend on the place in the batch
            watch=watch,
            ended=lambda row, result: take(row, result) if row < n else None,
        )
        self.tokens += sum(len(result.token_ids) for result in results[:n])

    def show(self, current: int = 0, answered: int = 0) -> None:
        """Show progress: tokens of this call, and seeds answered since the last call."""
        tokens = self.tokens + current
        rate = tokens / max(self.seconds, 1e-9)
        speed = f"{tokens} tokens, {rate:.{0 if rate > 9 else 1}f} tokens/s"
        self.progress.update(answered, speed if current else None)

    def answer(self, seeds: Sequence[Seed], on_end: Callable[[Json], None]) -> None:
        """Answer a batch of seeds; calls `on_end` with the output line of each."""
        model = self.model
        if self.mode == "continue":
            talks = [continuation(seed, prompt_of(model, seed)) for seed in seeds]
        else:
            context = model.tokenizer, model.config, self.chat_template
            limits: Json = {
                "self_talk": self.mode == "self_talk",
                "max_turns": self.max_turns,
            }
            talks = [talk(seed, *context, **limits) for seed in seeds]
        numbers = [seed.number for seed in seeds]
        converse(list(zip(numbers, talks)), self.decode, on_end)


def prompt_of(model: "Model", seed: Seed) -> list[int]:
    """Token ids of the prompt, cut so that at least one new token fits the context."""
    return model.encode(seed.prompt)[: model.config.max_position - 1]


def write_all(writer: Writer, path: Path, seeds: Sequence[Seed]) -> list[Json]:
    """Append the lines of these seeds to a file, each soon after the end of its answer.

    With several processes all decode and process 0 writes.

    Raises:
      Terminated: one of several processes received SIGTERM, and seeds are left.
    """
    lines: list[Json] = []
    with open(path if hosts.first() else os.devnull, "a") as file, writer.progress:

        def write(line: Json) -> None:
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            writer.show(answered=1)

        for batch, at in enumerate(range(0, len(seeds), writer.batch_size)):
            writer.answer(seeds[at : at + writer.batch_size], write)
            if hosts.asked_to_stop(batch) and at + writer.batch_size < len(seeds):
                raise Terminated
    return lines
