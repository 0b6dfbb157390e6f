"""Which cases of a check the default run takes; the wide run takes the others."""

import pytest


def wide(*cases):
    """Cases for `parametrize` that are left to the wide run; a tuple has one value for each name."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=pytest.mark.wide) for value in values]


def thinned(cases, *kept):
    """All cases in their order, those that are not kept left to the wide run."""
    cases = list(cases)
    assert kept and all(case in cases for case in kept), kept
    return [case if case in kept else wide(case)[0] for case in cases]
