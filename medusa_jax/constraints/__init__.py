"""Constrained output: constraints of a text, and the tokens that they allow next."""

from medusa_jax.constraints.constraint import Constraint, constraint_of
from medusa_jax.constraints.grammars import Grammars

__all__ = ["Constraint", "Grammars", "constraint_of"]
