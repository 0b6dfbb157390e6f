"""Seeds of self-distillation: the prompts for the model (Medusa 2.3.2).

Three modes:

    continue     a base model continues the seed's prompt
    multi_turn   a chat model answers the seed's user turns in order; answers in the seed are dropped
    self_talk    a chat model answers the seed's first user turn, then writes the next user turn, and so on
                 (for models trained on both roles; the paper names Zephyr); with --ask it also writes the
                 first one
"""

import dataclasses
from collections.abc import Sequence

from medusa_jax import hosts
from medusa_jax.console import inform
from medusa_jax.errors import UserError, one_of
from medusa_jax.training.data import conversations, sources

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


def read_seed(number: int, record: object, vocab_size: int = 2**31) -> Seed:
    """Parse a record of any common format; one that asks nothing gives a seed without turns and prompt.

    `{"prompt": ...}`, `{"prompt_ids": [...]}`, `{"turns": [...]}` (MT-bench), or a form of training data
    (`training/data/conversations.py`).

    Raises:
      UserError: the reason why none of its turns can be read, or ids that are not tokens.
    """
    fields = conversations.fields_of(record)
    if isinstance(fields.get("turns"), list):
        turns = tuple(t for t in fields["turns"] if isinstance(t, str) and t.strip())
        return Seed(number, turns=turns)
    name = conversations.field_of(fields, (*conversations.TURNS, "prompt_ids", "prompt"))
    prompt = fields.get(name)
    if name == "prompt_ids" and isinstance(prompt, list):
        if not all(type(i) is int and 0 <= i < vocab_size for i in prompt):
            raise UserError(f"prompt_ids that are not token ids below {vocab_size}")
        return Seed(number, prompt)
    texts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    problem = ""
    for turn in conversations.turns_of(record, answered=False).turns:
        message, reason = conversations.parse_turn(turn)
        problem = problem or reason
        if message and message["content"].strip():
            texts[message["role"]].append(message["content"])
    text, system = prompt if isinstance(prompt, str) else "", (texts["system"] or [""])[0]
    if problem and name in conversations.TURNS and not texts["user"]:
        raise UserError(problem)
    return Seed(number, text, system, tuple(texts["user"]))


def read_seeds(source: str, split: str, limit: int, vocab_size: int = 2**31) -> list[Seed]:
    """Seeds of a file or hub dataset, `limit` that ask something (0 is all); says which records ask nothing.

    Raises:
      UserError: unreadable, or no usable seed.
    """
    from medusa_jax.config import DataConfig

    records = sources.read_records(source, DataConfig(split=split))
    seeds: list[Seed] = []
    problems: dict[int, str] = {}
    for number, record in enumerate(records):
        if 0 < limit == number - len(problems):
            break
        try:
            seed = read_seed(number, sources.parse(record), vocab_size)
            problem = "nothing to ask"
            "".join((str(seed.prompt), seed.system, *seed.turns)).encode()
        except UnicodeEncodeError:
            seed, problem = Seed(number), "an unpaired surrogate, no valid character"
        except UserError as error:
            seed, problem = Seed(number), str(error)
        seeds.append(seed)
        if not (seed.turns or seed.prompt):
            problems[number] = problem
    reasons = sources.reasons(problems, records)
    if len(problems) == len(seeds):
        raise UserError(
            f"{source} has no seeds: records need prompt, prompt_ids, turns, messages, "
            f"conversations or a question ({reasons})"
        )
    if problems and hosts.first():
        inform(f"{source}: {len(problems)} of {len(seeds)} records skipped ({reasons})")
    return seeds


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
