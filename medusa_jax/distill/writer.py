"""Answers to seeds, batch after batch, and news of how far they are."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax import hosts
from medusa_jax.console import announced, inform
from medusa_jax.distill.conversation import Converse
from medusa_jax.distill.files import TextOptions
from medusa_jax.distill.seeds import Seed

# Two lines about progress are at least so many seconds apart where there is no terminal.
NEWS_SECONDS = 30.0


class News:
    """How far a run is: a bar at a terminal, else a line now and then, also within a batch.

    Args:
      total, done: seeds in all, and those that an earlier run answered.
    """

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self.total, self.before, self.done = total, done, done
        self.shown = hosts.first()
        hidden = None if self.shown else True
        self.bar = tqdm(total=total, initial=done, unit="seed", disable=hidden)
        self.start = self.told = time.perf_counter()
        # New tokens of the decode calls that are over, and of the one under way.
        self.tokens, self.growing = 0, 0

    def grow(self, n_new_B: np.ndarray) -> None:
        """Tokens of the rows that are being decoded."""
        self.growing = int(n_new_B.sum())
        self._tell()

    def call_done(self) -> None:
        """A decode call is over."""
        self.tokens, self.growing = self.tokens + self.growing, 0

    def batch_done(self, n: int) -> None:
        """The next `n` seeds are answered."""
        self.done += n
        self.bar.update(n)
        self._tell()

    def _tell(self) -> None:
        now = time.perf_counter()
        made = self.tokens + self.growing
        speed = made / (now - self.start)
        if not self.bar.disable:
            self.bar.set_postfix_str(f"{made} tokens, {speed:.0f} tokens/s")
        elif self.shown and now - self.told > NEWS_SECONDS:
            self.told = now
            line = f"{self.done} of {self.total} seeds, {made} tokens, {speed:.0f} tokens/s"
            if answered := self.done - self.before:
                left = (now - self.start) / answered * (self.total - self.done) / 60
                line += f", {left:.0f} minutes left"
            inform(line)


class Writer:
    """Answers batch after batch, with one decode call's shape for all of them."""

    def __init__(self, model: Any, asked: TextOptions, mode: str, options: Any, news: News):
        self.model, self.mode, self.options, self.news = model, mode, options, news
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
    ) -> list[Any]:
        """Continue prompts. Every seed has its own draws; rows are padded to one batch size.

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
        extra = self.batch_size - len(prompts)
        padded = prompts + [prompts[-1]] * extra
        rows += [rows[-1]] * extra
        with announced("compiling"):
            self.model.compile(padded, rows)
        results = self.model.generate(
            padded, rows, watch=lambda n_new_B: self.news.grow(n_new_B[: len(prompts)])
        )
        self.news.call_done()
        return results[: len(prompts)]

    def batches(self, seeds: Sequence[Any]) -> Iterator[list[dict[str, Any]]]:
        """Lines of each batch of seeds."""
        for first in range(0, len(seeds), self.batch_size):
            batch = list(seeds[first : first + self.batch_size])
            yield self.go_on(batch) if self.mode == "continue" else self.converse(batch)

    def go_on(self, seeds: list[Any]) -> list[dict[str, Any]]:
        """The continuation of each prompt."""
        prompts = [prompt_of(self.model, seed) for seed in seeds]
        results = self.decode(prompts, [seed.number for seed in seeds])
        return [
            {"prompt_ids": ids, "token_ids": result.token_ids}
            for ids, result in zip(prompts, results)
        ]


def prompt_of(model: Any, seed: Seed) -> list[int]:
    """Token ids to continue, which may fill all but one of the context's slots."""
    ids: list[int] = model.encode(seed.prompt)[: model.config.max_position - 1]
    return ids


def write_all(writer: Writer, path: Path, seeds: Sequence[Any]) -> list[dict[str, Any]]:
    """Append the lines of these seeds, a batch at a time, and show how far.

    Over several processes all of them decode and process 0 writes.

    Returns: the lines; not those of all seeds where SIGTERM was sent to one of several processes.
    """
    lines: list[dict[str, Any]] = []
    with open(path if hosts.first() else os.devnull, "a") as file, writer.news.bar:
        for n, batch in enumerate(writer.batches(seeds)):
            file.write("".join(json.dumps(line) + "\n" for line in batch))
            file.flush()
            lines += batch
            writer.news.batch_done(len(batch))
            if hosts.asked_to_stop(n):
                break
    return lines
