"""Seeds of self-distillation: the prompts for the model (Medusa 2.3.2).

Three modes:

    continue     a base model continues the seed's prompt
    multi_turn   a chat model answers the seed's user turns in order; answers in the seed are dropped
    self_talk    a chat model answers the seed's first user turn, then writes the next user turn, and so on
                 (for models trained on both roles; the paper names Zephyr); with --ask it also writes the
                 first one
"""

import dataclasses
import hashlib
from collections.abc import Sequence

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError, one_of
from medusa_jax.training.data.asked import asked, read_usable

MODES = ("continue", "multi_turn", "self_talk")


@dataclasses.dataclass(frozen=True)
class Seed:
    """One seed.

    Attributes:
      number: index of its line in the file; seeds the random draws.
      prompt: text or token ids to continue (mode "continue" only).
      system: system text, "" for none.
      turns: the user turns, in order.
      silent: whether the model also writes the first user turn.
    """

    number: int
    prompt: str | list[int] = ""
    system: str = ""
    turns: tuple[str, ...] = ()
    silent: bool = False


def read_seeds(source: str, split: str, limit: int, vocab_size: int = 2**31) -> list[Seed]:
    """Seeds of a file or hub dataset, `limit` of them (0 is all); says which records ask nothing.

    Raises:
      UserError: unreadable, or no usable seed.
    """

    def read(number: int, record: object) -> Seed:
        found = asked(record, vocab_size)
        return Seed(number, found.prompt, found.system, found.turns)

    return read_usable(source, DataConfig(split=split), read, limit)


def digest_of(seeds: Sequence[Seed]) -> str:
    """16 hex digits of the seeds' SHA-256."""
    return hashlib.sha256(repr(seeds).encode()).hexdigest()[:16]


def silent_seeds(n: int) -> list[Seed]:
    """Seeds of conversations whose first user turn the model writes (Magpie, arXiv 2406.08464)."""
    return [Seed(number, silent=True) for number in range(n)]


def mode_for(seeds: Sequence[Seed], mode: str, chat: bool = False) -> str:
    """Resolve "auto" to the mode for these seeds, and check `mode` against them.

    Args:
      chat: whether "auto" is for a chat model, which answers prompts that another model would continue.

    Raises:
      UserError: an unknown mode, or seeds that do not fit it.
    """
    if mode == "auto":
        answers = chat and any(s.turns for s in seeds)
        continues = any(s.prompt for s in seeds) and not answers
        mode = "continue" if continues else "multi_turn"
    one_of("--mode", mode, ("auto", *MODES))
    if mode == "continue" and any(s.turns and not s.prompt for s in seeds):
        raise UserError("--mode continue needs seeds with prompt or prompt_ids")
    if mode != "continue" and not any(s.turns for s in seeds):
        raise UserError(
            f"--mode {mode} needs seeds with messages, conversations, turns or prompt"
        )
    return mode
