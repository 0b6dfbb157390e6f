"""Other engines on the same weights and prompts, timed in runs interleaved with this one.

A peer's file has `contenders(setting)`, which imports its package and loads its models; `decode` returns exactly `new_tokens`
greedy tokens, and end-of-text tokens are ignored.
"""

from dataclasses import dataclass, replace

from medusa_jax.errors import UserError
from medusa_jax.evaluate.race import Run

# Tokens that peers draft with heads in a step, in a chain.
DRAFTED = 4


def counted(run: Run, accepted: int) -> Run:
    """A run of one prompt with its counts, of which engines tell the accepted drafts."""
    appended = len(run.texts[0]) - 1
    return replace(run, steps=appended - accepted, appended=appended)


@dataclass(frozen=True)
class Setting:
    """Prompts and limits that peers decode with.

    Attributes:
      model: as for `--model`.
      context: tokens of the longest text.
      heads: of a peer, EAGLE-3 heads in the form that its engine loads, or "".
    """

    model: str | None
    new_tokens: int
    context: int
    threads: int
    no_repeat_ngram_size: int
    repetition_penalty: float
    heads: str = ""

    def refuse_adjusted(self, engine: str) -> None:
        """Refuse a setting whose text depends on more than the logits."""
        if self.no_repeat_ngram_size or self.repetition_penalty != 1:
            raise UserError(
                f"{engine} bars no n-grams, and its penalty is another: give "
                "--no_repeat_ngram_size 0 --repetition_penalty 1"
            )
