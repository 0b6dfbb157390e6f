"""What the host knows of each row of the batch, and of programs whose results it has yet to see."""

from dataclasses import dataclass, field

import numpy as np

from medusa_jax.decoding.state import Progress
from medusa_jax.serving.job import Job


@dataclass
class Seat:
    """A row of the batch.

    Attributes:
      kept: tokens of the text that its cache is right for, whether its request has ended or not.
      drafted: how many of them the drafter has read; plain decoding does not advance it.
      job: the request that has it.
      used: the turn in which it last changed hands.
    """

    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    drafted: int = 0
    job: Job | None = None
    used: int = 0

    def keep(self, text: np.ndarray, drafted: int) -> None:
        """Its cache is right for this text from now on, and the drafter has taken so much of it in."""
        self.kept, self.drafted = text, min(drafted, len(text))


@dataclass
class Look:
    """What a program will have given when the host looks at it.

    Attributes:
      jobs: by row of `progress`, the requests that it was of.
      slots: of the cache then.
      tree_nodes: of the tree of its steps; 0: it took none.
    """

    progress: Progress
    jobs: dict[int, Job]
    slots: int
    tree_nodes: int


def shared_start(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two texts have in common at their start."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n
