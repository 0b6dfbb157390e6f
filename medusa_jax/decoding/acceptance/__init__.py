"""Acceptance rules: which path of the verified tree is kept, and which token follows it.

Each rule is a file and follows the contract of `rule.py`; every `Rule` in this package's
files is registered by its name. `greedy` and `sampled` are lossless, `rejection` is
lossless in distribution, `typical` is lossy.
"""

import importlib
import pkgutil

from medusa_jax.decoding.acceptance.rule import Accepted, Drafts, Rule, Verified

__all__ = ["RULES", "Accepted", "Drafts", "Rule", "Verified"]


def _find() -> dict[str, Rule]:
    """The rules of this package's files, by name."""
    found: dict[str, Rule] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        found |= {x.name: x for x in vars(module).values() if isinstance(x, Rule)}
    return dict(sorted(found.items()))


RULES: dict[str, Rule] = _find()
