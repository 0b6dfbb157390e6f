"""The roofline fitted to products that are timed here."""

import json
import math

import jax
import pytest

from medusa_jax.config import LlamaConfig
from medusa_jax.evaluate import roofline
from medusa_jax.interop.shapes import SHAPES
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


@pytest.mark.wide
def test_command_measures(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "llama-7b", TINY)
    monkeypatch.setattr(measure, "STRETCH", 1e-4)
    monkeypatch.setattr(measure, "MOST_COPIES", 2)
    flags = ["--measure_batches", "1", "--measure_lengths", "8,32",
             "--measure_trees", "4", "--rounds", "1", "--most_gflop", "2e-4",
             "--batches", "1", "--lengths", "32", "--out", str(tmp_path)]  # fmt: skip
    assert measure.main(flags) == 0
    said = capsys.readouterr().out
    assert "timings, 2 points larger than the limits" in said  # prefill of 32, q and up
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert {r["phase"] for r in measured["timings"]} == {"prefill", "decode", "tree"}
    assert all(r["seconds"] > 0 for r in measured["timings"])
    assert set(measured["fits"]) == set(roofline.GROUPS)
    # Predicted in the type that was timed: float32 moves twice what bfloat16 does.
    halves = roofline.block_operators(TINY, 1, 64, 1024)
    for half, whole in zip(halves, measured["predicted"]["operators"], strict=True):
        assert whole["bytes"] == 2 * half.bytes and whole["flops"] == half.flops
    assert (tmp_path / "measured.png").exists()
    assert (tmp_path / "acceleration.png").exists()
