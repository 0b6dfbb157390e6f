"""Appendix G: the paper's tables to the printed digit, the optimum, the fit, the command."""

import json
from dataclasses import replace

import pytest

from medusa_jax import UserError
from medusa_jax.config import LlamaConfig
from medusa_jax.devices import chips
from medusa_jax.files.hf_writer import config_to_hf
from research.roofline import command
from research.roofline import model as roofline
from research.shapes import SHAPES, find_shape

TINY = LlamaConfig(64, 64, 2, 4, 2, 16, 128, 128)
# Operational intensities in the tables 6 (by length, batch 16), 7 and 8 (by batch, length 1024) of the Medusa paper,
# a column per number of candidate tokens: Llama-33B on an A100-80GB-PCIe.
CANDIDATES = (1, 16, 32, 48, 64, 80, 96, 112)
QK_PV_BY_LENGTH = {
    128: (0.98, 12.8, 21.33, 27.43, 32.0, 35.56, 38.4, 40.73),
    256: (0.99, 13.47, 23.27, 30.72, 36.57, 41.29, 45.18, 48.43),
    512: (0.99, 13.84, 24.38, 32.68, 39.38, 44.91, 49.55, 53.49),
    1024: (0.99, 14.03, 24.98, 33.76, 40.96, 46.97, 52.07, 56.44),
    2048: (0.99, 14.12, 25.28, 34.32, 41.8, 48.08, 53.43, 58.04),
    4096: (0.99, 14.17, 25.44, 34.61, 42.23, 48.65, 54.13, 58.87),
    8192: (0.99, 14.2, 25.52, 34.76, 42.45, 48.94, 54.49, 59.3),
}
UP_GATE_DOWN_BY_BATCH = {
    1: (1.0, 15.95, 31.79, 47.53, 63.17, 78.7, 94.14, 109.47),
    2: (2.0, 31.79, 63.17, 94.14, 124.71, 154.89, 184.69, 214.12),
    4: (4.0, 63.17, 124.71, 184.69, 243.17, 300.21, 355.85, 410.14),
    8: (7.99, 124.71, 243.17, 355.85, 463.14, 565.44, 663.07, 756.36),
    16: (15.95, 243.17, 463.14, 663.07, 845.59, 1012.87, 1166.74, 1308.76),
    32: (31.79, 463.14, 845.59, 1166.74, 1440.25, 1675.97, 1881.24, 2061.59),
    64: (63.17, 845.59, 1440.25, 1881.24, 2221.31, 2491.55, 2711.46, 2893.91),
}


def intensity(name, batch, queries, length):
    found = roofline.block_operators(SHAPES["llama-33b"], batch, queries, length)
    return next(o.intensity for o in found if o.name == name)


def test_tables_6_7_and_8_to_the_printed_digit():
    """All 168 operational intensities."""
    checked, by_batch = 0, dict.fromkeys(UP_GATE_DOWN_BY_BATCH, QK_PV_BY_LENGTH[1024])
    for table, at in (
        (QK_PV_BY_LENGTH, lambda key, q: ("qk", 16, q, key)),
        (by_batch, lambda key, q: ("pv", key, q, 1024)),
        (UP_GATE_DOWN_BY_BATCH, lambda key, q: ("up", key, q, 1024)),
    ):
        for key, row in table.items():
            for queries, printed in zip(CANDIDATES, row, strict=True):
                assert f"{intensity(*at(key, queries)):.2f}" == f"{printed:.2f}"
                checked += 1
    assert checked == 168


def test_heads_that_share_keys_read_them_once():
    """Four query heads a group: the intensity of four queries."""
    one = roofline.attention("qk", replace(TINY, n_kv_heads=1), 1, 1, 50)
    four = roofline.attention("qk", replace(TINY, n_kv_heads=4), 1, 4, 50)
    assert one.intensity == four.intensity and 4 * one.flops == four.flops


def test_a_whole_step_reads_all_weights_and_the_cache():
    step = roofline.step_operators(SHAPES["llama-7b"], 1, 1, 1024, 4)
    moved = sum(o.calls * o.bytes for o in step)
    cache = 2 * 32 * 32 * 128 * 1024 * 2
    assert abs(moved / (2 * 6.607e9 + cache) - 1) < 2e-3
    heads = roofline.step_operators(SHAPES["llama-7b"], 1, 2, 1024, 4)[len(step) :]
    weights = 4 * 2 * (4096**2 + 4096 * 32000)
    assert abs(sum(o.calls * o.bytes for o in heads) / weights - 1) < 1e-3


def test_curve_of_a_tree_file(tmp_path):
    path = tmp_path / "tree.json"
    steps = {1: 1.0, 4: 2.0, 16: 2.5}
    ladder = [{"nodes": n, "tokens_per_step": t} for n, t in steps.items()]
    path.write_text(json.dumps({"choices": [], "evidence": {"ladder": ladder}}))
    curve = roofline.acceleration_of(str(path))
    found = [curve(n) for n in (1, 2, 4, 8, 16, 64)]
    assert found == pytest.approx([1, 1.5, 2, 2.25, 2.5, 2.5])
    path.write_text("[[0]]")
    with pytest.raises(UserError, match="holds no measured tokens per step"):
        roofline.acceleration_of(str(path))


def test_shapes_by_name_or_file(tmp_path):
    assert find_shape("llama3-8b").n_kv_heads == 8
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(TINY)))
    for name in (tmp_path, tmp_path / "config.json"):
        assert find_shape(str(name)).d_ff == 128


def test_command_predicts(capsys):
    """The optimum of figure 21: under ideal kernels the latency hardly grows before the wide layers reach the
    ridge, which the paper's 64 nodes do not."""
    ridge = chips.CHIPS["a100"].ridge
    up = [roofline.block_operators(SHAPES["llama-7b"], 1, n, 1024) for n in (170, 171)]
    below, above = (o.intensity for found in up for o in found if o.name == "up")
    assert below < ridge < above
    assert command.main(["--most_nodes", "200"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "| **170** | 3.53 | 244.5 | 1.12x | 3.15x |" in said
    assert "| TPU v6e (ridge 560) | 200 |" in said
    assert "| 8 | 21 | 1.92x | 1.04x |" in said
    assert command.main(["--most_nodes", "200", "--batch", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sizes"]
    top = roofline.best(rows)
    assert (len(rows), top["nodes"], round(top["speedup"], 2)) == (200, 42, 2.33)
