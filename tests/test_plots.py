"""The pictures: layout of trees and text, files that are written, errors."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import trees

from medusa_jax import plots
from medusa_jax.errors import UserError
from medusa_jax.plots import text
from medusa_jax.tree.tree import Tree

CHOICES = [[0], [1], [0, 0], [0, 1], [0, 0, 2]]
LABELS = ["root", "$x", "y", "z", "w", "v"]
SVG = "{http://www.w3.org/2000/svg}"


@given(trees(max_rank=9))
def test_layout_keeps_nodes_apart_and_ranks_in_order(tree):
    place = plots.tree_layout(tree.choices)
    assert len(set(place.values())) == len(place) == len(tree.choices) + 1
    for node, (x, depth) in place.items():
        assert depth == len(node)
        for other, (y, level) in place.items():
            if depth == level and node < other:
                assert y - x >= 1 - 1e-9


def svg_of(path):
    return ElementTree.parse(path).getroot()


@pytest.mark.parametrize("values", [(), [0.6, 0.1, 0.4, 0.05, 0.2]])
def test_draw_tree(tmp_path, values):
    path = plots.draw_tree(CHOICES, values, path=tmp_path / "new" / "tree.svg")
    assert svg_of(path).tag == SVG + "svg"
    png = plots.draw_tree([], path=tmp_path / "root.png")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_draw_curves_marks_the_best_size(tmp_path):
    curves = [1, 8, 64], [1.0, 2.0, 3.0], [0.001, 0.0011, 0.004]
    path = plots.draw_curves(*curves, path=tmp_path / "curves.svg")
    # Matplotlib writes each drawn string as a comment next to its outline.
    text = path.read_text()
    assert "2 at 8" in text and "1818 at 8" in text


def test_wrong_arguments_draw_nothing(tmp_path):
    with pytest.raises(UserError, match=r"\.svg"):
        plots.draw_accepted_text([("a", 0)], tmp_path / "x.png")
    for labels in (LABELS[1:], [*LABELS, "u"]):  # no picture with wrong labels
        with pytest.raises(ValueError):
            plots.draw_step(CHOICES, labels, [0], "b", path=tmp_path / "x.svg")
        with pytest.raises(ValueError):
            mask_MM = Tree.from_choices(CHOICES).mask_MM
            plots.draw_mask(mask_MM, labels, path=tmp_path / "x.svg")


def test_text_colours_and_places(tmp_path):
    segments = [("def", 0), (" f", 1), ("(", 2), ("):\n    ", 0), ("pass", 9), ("f", -2)]
    path = plots.draw_accepted_text(segments, tmp_path / "text.svg")
    root = svg_of(path)
    rects = [r.get("class") for r in root.iter(SVG + "rect")]
    # Background, two tokens on the first row, one clipped to the last colour, a copy, the legend.
    assert rects == ["g", "d1", "d2", "d6", "c", "d1", "d2", "d3", "d4", "d5", "d6", "c"]
    texts = {t.text: t for t in root.iter(SVG + "text")}
    assert {"def", "(", "):", "pass", "f", "6+", "copied from the text"} <= set(texts)
    for word, column in (("(", 5), ("pass", 4)):
        at = (float(texts[word].get("x")) - text._MARGIN) / text._ADVANCE
        assert at == pytest.approx(column, abs=0.02)
    assert float(texts["pass"].get("y")) - float(texts["("].get("y")) == text._LINE


def test_long_rows_continue_and_wide_characters_count_twice():
    runs, rows = text._runs([("abcdefgh", 1), ("日本", 2), ("\té", 0)], 10)
    assert runs == [
        (0, 0, 8, "abcdefgh", 1),
        (0, 8, 2, "日", 2),
        (1, 0, 2, "本", 2),
        (1, 2, 5, "    é", 0),
    ]
    assert rows == 2


def test_rows_break_between_words_and_boxes_begin_at_letters():
    tokens = [("Plants make", 0), (" photosyn", 1), ("thesis", 2), (" go on", 1)]
    runs, _ = text._runs(tokens, 18)
    assert [(row, column, word) for row, column, _, word, _ in runs] == [
        (0, 0, "Plants make"),
        (1, 0, "photosyn"),
        (1, 8, "thesis"),
        (1, 14, " go"),
        (2, 0, "on"),
    ]
    drawn = plots.accepted_text_svg([("Plants", 0), (" use", 1)])
    assert f'class="d1" x="{text._MARGIN + 7 * text._ADVANCE + 0.5:.1f}"' in drawn


@settings(max_examples=150)
@given(st.lists(st.tuples(st.text(max_size=12), st.integers(-2, 8)), max_size=12))
def test_any_text_is_well_formed_and_complete(segments):
    root = ElementTree.fromstring(plots.accepted_text_svg(segments, columns=20))
    shown = "".join(t.text or "" for t in root.iter(SVG + "text") if not t.get("class"))
    letters = re.compile(r"[a-zA-Z0-9<>&]")
    whole = "".join(text for text, _ in segments)
    assert letters.findall(shown) == letters.findall(whole)
    for run in text._runs(segments, 20)[0]:
        assert run[1] + run[2] <= 20


def test_draw_step(tmp_path):
    """The kept path in colour: three boxes and the two edges between them."""
    tree = Tree.from_choices(CHOICES)
    path = plots.draw_step(tree.choices, LABELS, [0, 1, 4], "b", path=tmp_path / "a.svg")
    text = path.read_text().lower()
    assert text.count(f"fill: {plots.style.ACCENT}") == 3
    assert text.count(f"stroke: {plots.style.ACCENT}") == 2
    assert text.count(f"fill: {plots.step.BONUS}") == 1
