"""Answer seeds batch by batch and report progress."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medusa_jax import hosts
from medusa_jax.console import announced, inform
from medusa_jax.distill.conversation import Converse
from medusa_jax.distill.files import TextOptions
from medusa_jax.distill.seeds import Seed
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api.model import Model
    from medusa_jax.api.results import Options, Result

# Least seconds between progress lines without a terminal.
PROGRESS_SECONDS = 30.0


class Progress:
    """Progress of a run: a bar on a terminal, else occasional lines.

    Args:
      total, done: number of seeds, and of those that an earlier run answered.
    """

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self.total, self.before, self.done = total, done, done
        self.shown = hosts.first()
        disable = None if self.shown else True
        self.bar = tqdm(total=total, initial=done, unit="seed", disable=disable)
        self.start = self.last_line = time.perf_counter()
        # New tokens of finished decode calls and of the current one.
        self.tokens, self.current = 0, 0

    def update_call(self, n_new_B: np.ndarray) -> None:
        """Update the number of new tokens of the current call."""
        self.current = int(n_new_B.sum())
        self._show()

    def call_done(self) -> None:
        """Count the tokens of a finished decode call."""
        self.tokens, self.current = self.tokens + self.current, 0

    def batch_done(self, n: int) -> None:
        """Count `n` answered seeds."""
        self.done += n
        self.bar.update(n)
        self._show()

    def _show(self) -> None:
        now = time.perf_counter()
        tokens = self.tokens + self.current
        speed = f"{tokens} tokens, {tokens / (now - self.start):.0f} tokens/s"
        if not self.bar.disable:
            self.bar.set_postfix_str(speed)
        elif self.shown and now - self.last_line > PROGRESS_SECONDS:
            self.last_line = now
            line = f"{self.done} of {self.total} seeds, {speed}"
            if answered := self.done - self.before:
                left = (now - self.start) / answered * (self.total - self.done) / 60
                line += f", {left:.0f} minutes left"
            inform(line)


class Writer:
    """Answers seeds in batches of one shape, so that decoding is compiled once."""

    def __init__(
        self,
        model: "Model",
        asked: TextOptions,
        mode: str,
        options: "Options",
        progress: Progress,
    ):
        self.model, self.mode, self.options, self.progress = model, mode, options, progress
        self.batch_size = asked.batch_size
        self.converse = Converse(
            model.tokenizer, model.config.max_position, self.decode, asked.chat_template,
            mode == "self_talk", asked.max_turns,
        )  # fmt: skip
        self.user_options = dataclasses.replace(
            options, temperature=asked.user_temperature, max_new_tokens=asked.user_tokens
        )

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
        with announced("compiling"):
            self.model.compile(padded, rows)
        results = self.model.generate(
            padded,
            rows,
            watch=lambda n_new_B: self.progress.update_call(n_new_B[: len(prompts)]),
        )
        self.progress.call_done()
        return results[: len(prompts)]

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
    with open(path if hosts.first() else os.devnull, "a") as file, writer.progress.bar:
        for n, batch in enumerate(writer.batches(seeds)):
            file.write("".join(json.dumps(line) + "\n" for line in batch))
            file.flush()
            lines += batch
            writer.progress.batch_done(len(batch))
            if hosts.asked_to_stop(n):
                break
    return lines
