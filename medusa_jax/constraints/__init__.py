"""Constrained output: what a text may look like, and which tokens that leaves at each place."""

from medusa_jax.constraints.asked import Constraint, constraint_of
from medusa_jax.constraints.grammars import Grammars

__all__ = ["Constraint", "Grammars", "constraint_of"]
