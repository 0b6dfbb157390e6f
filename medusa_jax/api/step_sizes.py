"""`--tree auto`: the tree sizes that steps choose from, and their costs on this machine."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from medusa_jax.api.tree_choice import TreeChoice
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.tree_size.costs import StepCosts
from medusa_jax.decoding.tree_size.gate import Gate
from medusa_jax.heads.drafter import Drafter
from medusa_jax.measured import DeviceCache


def text_is_free(engine: Engine, dtype: np.dtype) -> bool:
    """Whether the text cannot depend on the trees of its steps.

    It depends on them if the rule reads the drafts, and in 16-bit arithmetic, where passes over different numbers
    of tokens round differently.
    """
    return not engine.rule.by_drafts and dtype.itemsize >= 4


@dataclass
class StepSizes:
    """The sizes of a model's tree, with the time of a step with each over a plain step's.

    Costs are measured while streams run; `calibrate`'s are the first guess if it ran with this model on this machine.

    Attributes:
      trees: the model's.
    """

    trees: TreeChoice
    _costs: dict[Any, StepCosts] = field(default_factory=dict)

    def gated(self, drafter: Drafter, engine: Engine) -> Engine:
        """The engine with a choice among the sizes of its tree; `engine` if there is only one."""
        sizes = self.trees.sizes(engine.tree)
        return replace(engine, drafter=drafter, gated=sizes) if len(sizes) > 1 else engine

    def gate(self, engine: Engine, rows: int) -> Gate:
        """The gate at the start of a text."""
        costs, nodes_N = self.costs(engine), [tree.n_nodes for tree in engine.gated]
        ratios = costs.ratios(rows, nodes_N).tolist()
        if not costs.chunks(rows, nodes_N[-1]):
            known = self.trees.step_ratios(engine.gated, rows, engine.acceptance)
            ratios = known or ratios
        return Gate.before_text(engine.gated, ratios, self.trees.tokens(engine.gated))

    def costs(self, engine: Engine) -> StepCosts:
        """The costs of the sizes with this rule: sampling draws noise for every level."""
        key = engine.acceptance, engine.gated
        if key not in self._costs:
            nodes_N = [tree.n_nodes for tree in engine.gated]
            note = DeviceCache("step_costs", self.trees.mark, engine.acceptance, nodes_N)
            self._costs[key] = StepCosts(note)
        return self._costs[key]
