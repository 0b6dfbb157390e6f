"""Acceptance rules: which path of the verified tree is kept, and which token follows it.

Each rule follows the contract of `rule.py`. `greedy` and `sampled` are lossless, `rejection` is
lossless in distribution, `typical` is lossy.
"""

import importlib

from medusa_jax.decoding.acceptance.rule import Accepted, Drafts, Rule, Verified

__all__ = ["RULES", "Accepted", "Drafts", "Rule", "Verified", "rule_named"]

# The files of the rules.
RULES = {
    "greedy": "targets", "rejection": "rejection", "sampled": "targets", "typical": "typical",
}  # fmt: skip


def rule_named(name: str) -> Rule:
    """The rule with this name.

    Raises:
      KeyError: no rule has it.
    """
    # A seam: `--acceptance` chooses.
    module = importlib.import_module(f"{__name__}.{RULES[name]}")
    rules = (x for x in vars(module).values() if isinstance(x, Rule))
    return next(rule for rule in rules if rule.name == name)
