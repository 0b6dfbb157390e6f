"""Acceptance rules: which path of the verified tree is kept, and which token follows it.

Each rule follows the contract of `rule.py`. `greedy` and `sampled` are lossless, `rejection` is
lossless in distribution, `typical` is lossy.
"""

from medusa_jax.decoding.acceptance.rejection import REJECTION
from medusa_jax.decoding.acceptance.rule import Accepted, Drafts, Rule, Verified
from medusa_jax.decoding.acceptance.targets import GREEDY, SAMPLED
from medusa_jax.decoding.acceptance.typical import TYPICAL

__all__ = ["RULES", "Accepted", "Drafts", "Rule", "Verified"]

# By name: the values of `--acceptance`.
RULES = {rule.name: rule for rule in (GREEDY, REJECTION, SAMPLED, TYPICAL)}
