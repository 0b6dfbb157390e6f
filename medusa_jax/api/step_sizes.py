"""`--tree auto`: the tree sizes that steps choose from, and their costs on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from medusa_jax.api.results import Options
from medusa_jax.api.tree_choice import sizes_of, tokens_of
from medusa_jax.decoding.gate import Gate
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.step_costs import step_costs
from medusa_jax.heads.drafter import Drafter
from medusa_jax.measured import DeviceCache
from medusa_jax.sharding import Params
from medusa_jax.whole_files import Json


def text_is_free(engine: Engine, rows: Sequence[Options], dtype: np.dtype) -> bool:
    """Whether the text cannot depend on the trees of its steps.

    It depends on them if the rule reads the drafts, if steps are limited, and in 16-bit arithmetic, where
    passes over different numbers of tokens round differently. Constraints need the host in every step.
    """
    exact = engine.rule.lossless and not engine.rule.by_drafts and dtype.itemsize >= 4
    return exact and all(o.max_steps is None and o.constraint is None for o in rows)


@dataclass
class StepSizes:
    """The sizes of a model's tree, with the time of a step with each over a plain step's.

    Costs are those of `calibrate` if it ran with this model on this machine. Else they are measured once,
    when the decode loop is first compiled here, and cached. Neither changes, so that a command takes the
    same sizes at every start.

    Attributes:
      mark: `tree_choice.step_mark`.
      calibrated: content of the tree file, or None.
    """

    mark: str
    calibrated: Json | None
    _costs: dict[str, list[float]] = field(default_factory=dict)

    def gated(self, drafter: Drafter, engine: Engine) -> Engine:
        """The engine with a choice among the sizes of its tree; `engine` if there is only one."""
        sizes = sizes_of(engine.tree, self.calibrated)
        return replace(engine, drafter=drafter, gated=sizes) if len(sizes) > 1 else engine

    def gate(self, engine: Engine, rows: int) -> Gate:
        """The gate at the start of a text; unmeasured steps are assumed to cost the same."""
        costs = self.costs(engine, rows) or [1.0] * len(engine.gated)
        return Gate.before_text(
            engine.gated, costs, tokens_of(engine.gated, self.calibrated)
        )

    def costs(self, engine: Engine, rows: int) -> list[float] | None:
        """The costs of the sizes, None before `measure`."""
        key = self._key(engine, rows)
        if key not in self._costs:
            costs = self._calibrated(engine, rows) or self._cache(engine).read().get(key)
            checked = _checked(costs, len(engine.gated))
            if checked is None:
                return None
            self._costs[key] = checked
        return self._costs[key]

    def measure(self, engine: Engine, variables: Params, state: DecodeState) -> Gate:
        """Measure and store the costs; returns the gate. Consumes the state."""
        rows, cache = len(state.length_B), self._cache(engine)
        costs = step_costs(engine, variables, state, self.gate(engine, rows))
        cache.write(cache.read() | {self._key(engine, rows): costs})
        self._costs[self._key(engine, rows)] = costs
        return self.gate(engine, rows)

    def _key(self, engine: Engine, rows: int) -> str:
        """Key of measured costs, by the rule as well: sampling draws noise for every level."""
        sizes = ",".join(str(tree.n_nodes) for tree in engine.gated)
        return f"{rows} {engine.acceptance} {sizes}"

    def _cache(self, engine: Engine) -> DeviceCache:
        return DeviceCache("steps", self.mark, engine.tree.choices, engine.tree.spares)

    def _calibrated(self, engine: Engine, rows: int) -> list[float] | None:
        """The tree file's costs, if they were measured like this; None if it lacks a size."""
        file: Mapping = self.calibrated or {}
        if (file.get("mark"), file.get("acceptance")) != (self.mark, engine.acceptance):
            return None
        rungs = [rung for rung in file.get("batches") or () if rung["batch"] == rows]
        timed = {row["nodes"]: row for rung in rungs for row in rung.get("rows") or ()}
        ratios = [
            timed.get(tree.n_nodes, {}).get("step_latency_ratio")
            for tree in engine.gated[1:]
        ]
        return None if None in ratios else [1.0, *ratios]


def _checked(costs: Any, n: int) -> list[float] | None:
    """The n costs of a cache entry; None if it is damaged, so that they are measured again."""
    if not isinstance(costs, list) or len(costs) != n:
        return None
    numbers = all(isinstance(x, int | float) and 0 < x < np.inf for x in costs)
    return costs if numbers else None
