"""Requests of decode.py that are ready to be decoded, and their reports."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from medusa_jax.api import Model, Options, Result
from medusa_jax.api.prompts import Prompt
from medusa_jax.commands.decode_report import describe
from medusa_jax.console import announced
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.evaluate.compare import Comparison


@dataclasses.dataclass(frozen=True)
class DecodeJob:
    """Requests that are ready to be decoded.

    Attributes:
      acceptance: name of the rule.
      repeats: timed runs of a comparison with plain decoding; 0: no comparison.
      forms: how each prompt was read, "chat", "raw text" or "a middle".
    """

    model: Model
    prompts: list[Prompt]
    options: list[Options]
    acceptance: str
    repeats: int
    forms: list[str]

    def batch(self, rows: list[int]) -> tuple[list[Prompt], list[Options], list[int]]:
        """The prompts, options and ids of these rows, as `Model.generate` takes them."""
        return [self.prompts[i] for i in rows], [self.options[i] for i in rows], rows

    def generate(self, rows: list[int]) -> list[Result]:
        return self.model.generate(*self.batch(rows), acceptance=self.acceptance)

    def facts(
        self, rows: list[int], results: list[Result], as_json: bool = True
    ) -> list[Json]:
        """The reports of these rows, compared with plain decoding if requested."""
        compared: Sequence[Comparison | None] = [None] * len(rows)
        prompts, options, ids = self.batch(rows)
        if self.repeats:
            from medusa_jax.evaluate.compare import compare

            with announced("timing the autoregressive loop"):
                compared = compare(
                    self.model,
                    prompts,
                    options,
                    ids=ids,
                    repeats=self.repeats,
                    acceptance=self.acceptance,
                )
        reports = [
            describe(self.model, result, self.acceptance, option, comparison, self.forms[i])
            for i, result, option, comparison in zip(rows, results, options, compared)
        ]
        if as_json:
            from medusa_jax.evaluate.weight_bytes import bytes_per_token, stored_as

            for report in reports:
                report["weights_stored_as"] = stored_as(self.model)
                n = report["prompt_tokens"]
                report["bytes_per_step"] = bytes_per_token(self.model, n)
        return reports
