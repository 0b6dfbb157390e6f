"""Answer seeds batch by batch."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_jax import hosts
from medusa_jax.console import announced
from medusa_jax.distill.conversation import Converse
from medusa_jax.distill.seeds import Seed
from medusa_jax.progress import Progress
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api.model import Model
    from medusa_jax.api.results import Options, Result


class Writer:
    """Answers seeds in batches of one shape, so that decoding is compiled once.

    Args:
      options, user_options: of answers, and of user turns that the model writes.
      chat_template, max_turns: as for `Converse`.
    """

    def __init__(
        self,
        model: "Model",
        mode: str,
        options: "Options",
        user_options: "Options",
        *,
        batch_size: int,
        chat_template: str,
        max_turns: int,
        progress: Progress,
    ):
        self.model, self.mode, self.options, self.progress = model, mode, options, progress
        self.start = time.perf_counter()
        # New tokens of finished decode calls.
        self.tokens = 0
        self.batch_size, self.user_options = batch_size, user_options
        self.converse = Converse(
            model.tokenizer, model.config.max_position, self.decode, chat_template,
            mode == "self_talk", max_turns,
        )  # fmt: skip

    def decode(
        self,
        prompts: list[list[int]],
        numbers: list[int],
        stops: Sequence[str] | None = None,
    ) -> "list[Result]":
        """Continue prompts; the random draws depend on the seed's number, batches are padded to one size.

        Args:
          stops: for user turns, the string that ends each, "" for none.
        """
        options = self.options if stops is None else self.user_options
        rows = [
            dataclasses.replace(
                options,
                seed=options.seed + number,
                stop=(stops[i],) if stops and stops[i] else (),
            )
            for i, number in enumerate(numbers)
        ]
        n_padding = self.batch_size - len(prompts)
        padded = prompts + [prompts[-1]] * n_padding
        rows += [rows[-1]] * n_padding
        # One tree throughout, so that a resumed run writes the same text even where scores are tied.
        tree = self.model.tree_at(len(padded))
        with announced("compiling"):
            self.model.compile(padded, rows, tree=tree)
        results = self.model.generate(
            padded,
            rows,
            tree=tree,
            watch=lambda n_new_B: self.show(int(n_new_B[: len(prompts)].sum())),
        )[: len(prompts)]
        self.tokens += sum(len(result.token_ids) for result in results)
        return results

    def show(self, current: int = 0, answered: int = 0) -> None:
        """Show progress: tokens of the current call, and seeds answered since the last call."""
        tokens = self.tokens + current
        speed = tokens / (time.perf_counter() - self.start)
        self.progress.update(answered, f"{tokens} tokens, {speed:.0f} tokens/s")

    def batches(self, seeds: Sequence[Seed]) -> Iterator[list[Json]]:
        """Output lines of each batch of seeds."""
        for first in range(0, len(seeds), self.batch_size):
            batch = list(seeds[first : first + self.batch_size])
            yield (
                self.continue_prompts(batch)
                if self.mode == "continue"
                else self.converse(batch)
            )

    def continue_prompts(self, seeds: list[Seed]) -> list[Json]:
        """Output lines with the continuation of each prompt."""
        prompts = [prompt_of(self.model, seed) for seed in seeds]
        results = self.decode(prompts, [seed.number for seed in seeds])
        return [
            {"prompt_ids": ids, "token_ids": result.token_ids}
            for ids, result in zip(prompts, results)
        ]


def prompt_of(model: "Model", seed: Seed) -> list[int]:
    """Token ids of the prompt, cut so that at least one new token fits the context."""
    return model.encode(seed.prompt)[: model.config.max_position - 1]


def write_all(writer: Writer, path: Path, seeds: Sequence[Seed]) -> list[Json]:
    """Append the lines of these seeds to a file, batch by batch.

    With several processes all decode and process 0 writes.

    Returns: the lines; incomplete if one of several processes received SIGTERM.
    """
    lines: list[Json] = []
    with open(path if hosts.first() else os.devnull, "a") as file, writer.progress:
        for n, batch in enumerate(writer.batches(seeds)):
            file.write("".join(json.dumps(line) + "\n" for line in batch))
            file.flush()
            lines += batch
            writer.show(answered=len(batch))
            if hosts.asked_to_stop(n):
                break
    return lines
