"""Which size of tree pays, from rounds in which sizes were timed in turn on a busy machine.

What else runs on a machine comes in bursts and only ever adds. So sizes are compared by ratios within
a round, whose parts lie close together; of the rounds the slower half is left out; and how far the
others still differ is kept beside the figures, so that a choice that noise could have turned is known
for one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# Seconds of some steps by number of nodes, plain decoding (1) always among them.
Round = Mapping[int, float]

# A larger tree must be faster by more than that, which two measurements may differ by.
MARGIN = 1.02
# What a choice may cost, as far as is known, that is not looked at again.
REGRET = 1.05
# After so many sizes in a row that do not pay, larger ones are not tried.
PATIENCE = 2
# Rounds with plain decoding alone that a size begins with, and least and most of all sizes in turn, as
# many as fit into SECONDS; on a machine that is so busy that PATIENT seconds have passed, no more.
LOOKS, LEAST, MOST = 2, 6, 24
SECONDS, PATIENT = 3.0, 20.0


def row(rounds: Sequence[Round], size: int, tokens_per_step: float) -> dict[str, Any]:
    """A size's figures: step latency ratio and speed-up against plain decoding of the same rounds.

    Returns: with them, as shares of the ratio, `spread`, which is between the quartiles of the ratios,
      and `error`, how far their median is to be trusted: 1, not at all, with fewer than `LEAST` rounds.
    """
    pairs = sorted(((r[1], r[size]) for r in rounds if size in r), key=sum)
    quiet = pairs[: math.ceil(len(pairs) / 2)]
    low, ratio, high = np.quantile([own / plain for plain, own in quiet], [0.25, 0.5, 0.75])
    spread = (high - low) / ratio
    figures = {
        "tokens_per_step": tokens_per_step,
        "step_latency_ratio": ratio,
        "speedup": tokens_per_step / ratio,
        "spread": spread,
        # Twice: rounds that would tell of noise were left out. With once that, one choice in twelve
        # on a machine that is never quiet counted as sure (`tests/test_rounds.py`).
        "error": 2 * spread / math.sqrt(len(quiet)) if len(pairs) >= LEAST else 1.0,
    }
    return {"nodes": size} | {name: round(float(x), 4) for name, x in figures.items()}


PLAIN = {"nodes": 1, "speedup": 1.0, "error": 0.0}


def best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A size that none beats by more than `MARGIN`, small ones first; `PLAIN` where none pays."""
    found: Mapping[str, Any] = PLAIN
    for figures in rows:
        if figures["speedup"] > MARGIN * found["speedup"]:
            found = figures
    return found


def is_sure(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing can be much faster than the choice, so far as the errors say."""
    chosen = best(rows)
    least = chosen["speedup"] * (1 - chosen["error"])
    most = max(r["speedup"] * (1 + r["error"]) for r in (PLAIN, *rows))
    return most <= REGRET * least


class Race:
    """Growing trees against plain decoding and each other.

    Args:
      seconds: times some steps with so many nodes; what has to be compiled first is not in it.
      tokens: tokens per step of the sizes that may be tried.
      earlier: rounds of earlier races, which count as well.
    """

    def __init__(
        self,
        seconds: Callable[[int], float],
        tokens: Mapping[int, float],
        earlier: Sequence[Round] = (),
    ) -> None:
        self.seconds, self.tokens, self.spent = seconds, tokens, 0.0
        self.rounds = [r for r in earlier if r.keys() <= {1, *tokens}]

    def run(self) -> None:
        """Try sizes until `PATIENCE` of them do not pay, then all of them in turn; where the last
        ones pay after all, larger ones as well."""
        while self.spent < PATIENT:
            while (larger := self._may_pay()) and self.spent < PATIENT:
                for _ in range(LOOKS):
                    self._time_in_turn([larger[0]])
            for done in range(MOST):
                if self.spent > (SECONDS if done >= LEAST else PATIENT):
                    break
                self._time_in_turn([figures["nodes"] for figures in self.rows()])
            if not self._may_pay():
                return

    def choice(self) -> dict[str, Any]:
        """The figures of all sizes (`rows`), the one to take (`nodes`), and whether it is `sure`."""
        rows = self.rows()
        known = [figures for figures in rows if figures["error"] < 1]
        return {"nodes": best(known)["nodes"], "rows": rows, "sure": is_sure(rows)}

    def rows(self) -> list[dict[str, Any]]:
        """The figures of all sizes that were tried, smallest first."""
        tried = {size for one in self.rounds for size in one} - {1}
        return [row(self.rounds, size, self.tokens[size]) for size in sorted(tried)]

    def _time_in_turn(self, sizes: Sequence[int]) -> None:
        self.rounds.append({size: self.seconds(size) for size in (1, *sizes)})
        self.spent += sum(self.rounds[-1].values())

    def _may_pay(self) -> list[int]:
        """Sizes larger than those tried, unless the last of these do not pay."""
        sizes = [figures["nodes"] for figures in self.rows()]
        chosen = best(self.rows())["nodes"]
        if sum(size > chosen for size in sizes) >= PATIENCE:
            return []
        return [size for size in self.tokens if size > max(sizes, default=1)]
