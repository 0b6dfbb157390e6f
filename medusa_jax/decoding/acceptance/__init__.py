"""Acceptance: which path of the verified tree is kept, and which token follows it.

One file per rule under the contract of `rule.py`; every `Rule` in this package's files is there by
its name. `greedy` and `sampled` are lossless, `rejection` is lossless in distribution, `typical`
is lossy.
"""

import importlib
import pkgutil

from medusa_jax.decoding.acceptance.rule import Accepted, Rule, Verified

__all__ = ["RULES", "Accepted", "Rule", "Verified"]

# In the order of their promises: lossless first.
RULES: dict[str, Rule] = {
    value.name: value
    for file in pkgutil.iter_modules(__path__)
    for value in vars(importlib.import_module(f"{__name__}.{file.name}")).values()
    if isinstance(value, Rule)
}
