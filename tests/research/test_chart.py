"""The bars beside llama.cpp show the figures of the results."""

from medusa_jax.whole_files import read_text
from research import chart

ROOT = chart.RESULTS.parents[1]


def test_the_picture_has_the_figures_of_the_results(tmp_path):
    """Drawn again it is the committed one; the words for readers who cannot see it have the same figures."""
    assert chart.main([f"--out={tmp_path / 'x.svg'}"]) == 0
    drawn = ROOT / "docs" / "speed.svg"
    assert (tmp_path / "x.svg").read_text() == drawn.read_text()
    rows = chart.figures(read_text(chart.RESULTS))
    assert [value for _, value in rows] == [147, 260, 376, 481]
    for page in ("README.md", "docs/index.md"):
        [line] = [x for x in (ROOT / page).read_text().splitlines() if "speed.svg" in x]
        assert all(f" {value:.0f}" in line for _, value in rows)
