"""The roofline fitted to products that are timed here."""

import math

import jax
import pytest

from medusa_jax.config import LlamaConfig
from medusa_jax.evaluate import roofline
from research import roofline as measure

TINY = LlamaConfig(64, 64, 2, 4, 2, 16, 128, 128)


def test_the_timed_products_are_those_that_are_counted():
    """FLOPs by XLA and bytes by shapes; every group, and linear layers once for all lengths."""
    found = list(measure.cases(TINY, (2,), (8, 12), (3,), 4))
    assert {c.operator.group for c in found} == set(roofline.GROUPS)
    alike = [(c.operator.name, c.phase, c.queries) for c in found if c.phase != "prefill"]
    assert alike.count(("up", "tree", 3)) == 1 and alike.count(("qk", "tree", 3)) == 2
    for case in found:
        function, shapes = measure.product_of(TINY, case, "float32")
        first, second = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
        if case.operator.group != roofline.ATTENTION:
            first = {"kernel": first}
        lowered = jax.jit(function).lower(first, second)
        assert lowered.cost_analysis()["flops"] == case.operator.flops, case
        moved = math.prod(lowered.out_info.shape) + sum(map(math.prod, shapes))
        assert 4 * moved == case.operator.bytes, case


def test_a_fit_finds_the_roof_that_timings_were_made_from():
    true = roofline.Roof(3e13, 7e11, 4e-6)
    made = [roofline.linear("x", "g", rows, 4096, 4096) for rows in (1, 8, 64, 512, 4096)]
    made += [roofline.linear("x", "g", 8, n, n) for n in (64, 128, 256)]
    records = [
        {"flops": o.flops, "bytes": o.bytes, "seconds": true.seconds(o)} for o in made
    ]
    fit = measure.fit_roof(records)
    found = (fit.roof.flops, fit.roof.bandwidth, fit.roof.overhead)
    assert found == pytest.approx((3e13, 7e11, 4e-6), rel=1e-3)
    assert fit.error < 1e-3 and fit.bound == (3, 2, 3)
    only = measure.fit_roof(
        records[:2] + records[5:]
    )  # nothing there is bound by arithmetic
    assert only.bound[0] == 0
    (line,) = measure.fit_table({"g": only}).splitlines()[2:]
    assert line.startswith("| g | - | 700.0 |")
