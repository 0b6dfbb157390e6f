"""Answer seeds batch by batch; every answer is on disk soon after its end."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_jax import hosts
from medusa_jax.console import announced
from medusa_jax.distill.conversation import Take, continuation, converse, talk
from medusa_jax.distill.seeds import Seed
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
      tokens: new tokens of finished decode calls.
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
    start: float = dataclasses.field(default_factory=time.perf_counter)

    def decode(
        self,
        prompts: list[list[int]],
        numbers: list[int],
        stops: Sequence[str] | None,
        take: Take,
    ) -> None:
        """Continue prompts; the random draws depend on the seed's number, batches are padded to one size.

        Args:
          stops: for user turns, the string that ends each, "" for none.
          take: called with the index and the result of each prompt.
        """
        n, options = len(prompts), self.options if stops is None else self.user_options
        rows = [
            dataclasses.replace(
                options,
                seed=options.seed + number,
                stop=(stops[i],) if stops and stops[i] else (),
            )
            for i, number in enumerate(numbers)
        ]
        prompts = prompts + [prompts[-1]] * (self.batch_size - n)
        rows += [rows[-1]] * (self.batch_size - n)
        # One tree throughout: a resumed run writes the same text even where scores are tied.
        tree = self.model.tree_at(len(prompts))
        with announced("compiling the decoding loop (once for each size of the texts)", 1):
            self.model.compile(prompts, rows, tree=tree)
        results = self.model.generate(
            prompts,
            rows,
            tree=tree,
            ids=[0] * len(rows),  # a draw must not depend on the place in the batch
            watch=lambda n_new_B: self.show(int(n_new_B[:n].sum())),
            ended=lambda row, result: take(row, result) if row < n else None,
        )
        self.tokens += sum(len(result.token_ids) for result in results[:n])

    def show(self, current: int = 0, answered: int = 0) -> None:
        """Show progress: tokens of this call, and seeds answered since the last call."""
        tokens = self.tokens + current
        speed = tokens / (time.perf_counter() - self.start)
        self.progress.update(answered, f"{tokens} tokens, {speed:.0f} tokens/s")

    def answer(self, seeds: Sequence[Seed], on_end: Callable[[Json], None]) -> None:
        """Answer a batch of seeds; calls `on_end` with the output line of each."""
        model = self.model
        if self.mode == "continue":
            talks = [continuation(seed, prompt_of(model, seed)) for seed in seeds]
        else:
            talks = [
                talk(
                    seed,
                    model.tokenizer,
                    model.config,
                    self.chat_template,
                    self_talk=self.mode == "self_talk",
                    max_turns=self.max_turns,
                )
                for seed in seeds
            ]
        numbers = [seed.number for seed in seeds]
        converse(list(zip(numbers, talks)), self.decode, on_end)


def prompt_of(model: "Model", seed: Seed) -> list[int]:
    """Token ids of the prompt, cut so that at least one new token fits the context."""
    return model.encode(seed.prompt)[: model.config.max_position - 1]


def write_all(writer: Writer, path: Path, seeds: Sequence[Seed]) -> list[Json]:
    """Append the lines of these seeds to a file, each soon after the end of its answer.

    With several processes all decode and process 0 writes.

    Returns: the lines; incomplete if one of several processes received SIGTERM.
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
            if hosts.asked_to_stop(batch):
                break
    return lines
