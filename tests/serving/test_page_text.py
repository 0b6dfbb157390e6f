"""The page's text in Node, without a browser: how long it takes, and which draft depth is shown where."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from medusa_jax.serving import http

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(not NODE, reason="needs Node")
# Elements as far as the page makes them; prints the depth of each character that is shown.
SCRIPT = """
class Element {
  constructor(tag) { this.tag = tag; this.children = []; this.style = {}; this.className = ""; }
  append(...more) { this.children.push(...more); }
  addEventListener() {}
}
globalThis.document = {createElement: tag => new Element(tag)};
const fs = require("fs"), source = fs.readFileSync(process.argv[1], "utf8");
const page = new Function(source + "; return {blocksOf, blockElement, textOf}")();
const answer = JSON.parse(fs.readFileSync(0, "utf8")), text = page.textOf(answer), shown = [], kinds = [];
function visit(element) {
  const depth = /^d d(\\d)/.exec(element.className);
  kinds.push(element.className.split(" ")[0] || element.tag);
  if (element.textContent) shown.push([element.textContent, depth ? Number(depth[1]) : 0]);
  element.children.forEach(visit);
}
for (const block of page.blocksOf(text, true)) visit(page.blockElement(answer, text, block));
console.log(JSON.stringify([shown, kinds]));
"""


def shown(runs, kinds=None):
    """The characters with their depths; adds the classes or tags of the elements to `kinds`."""
    file = Path(http.__file__).parent / "page_text.js"
    done = subprocess.run(
        [NODE, "-e", SCRIPT, file],
        input=json.dumps({"runs": runs}),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    found, made = json.loads(done.stdout)
    if kinds is not None:
        kinds += made
    return [(c, depth) for text, depth in found for c in text]


def unmarked_blanks(pairs):
    """Whether a blank is marked depends on its place."""
    return [(char, 0 if char.isspace() else depth) for char, depth in pairs]


def test_depths_are_those_of_the_runs():
    chance = random.Random(0)
    for text in ("plain words **and `strong` ones** here", "*a* b\nc", "x"):
        cuts = sorted(chance.choices(range(len(text) + 1), k=9))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None])]
        runs = [[piece, chance.randrange(4)] for piece in pieces]
        depths = [depth for piece, depth in runs for _ in piece]
        expected = [pair for pair in zip(text, depths) if pair[0] not in "*`"]
        assert unmarked_blanks(shown(runs)) == unmarked_blanks(expected)


@pytest.mark.parametrize("mark", ["- **a** b\n", "**a** `b` ", "**a ", "`a ``b "])
def test_thousands_of_marks_are_shown_soon(mark):
    """In linear time; `shown` has a limit of 20 s, a tenth of what 4,000 took in quadratic time."""
    text = mark * 4000
    assert len(shown([[text[i : i + 3], i % 3] for i in range(0, len(text), 3)])) > 4000


MARKDOWN = """# A title
Some **bold** text, `code`, *slanted* and 2 * 3; <img src=x onerror="alert()"> <script>alert()</script>

- one

```python
x = "# no title, **not bold**"
```
> said
"""


def test_markdown_without_html():
    """Elements are of the page alone; what looks like HTML is shown as it is."""
    kinds = []
    text = "".join(c for c, _ in shown([[MARKDOWN, 1]], kinds))
    elements = {"head", "text", "strong", "code", "em", "item", "quote", "bar", "small"}
    assert elements <= {*kinds} <= elements | {"d", "span", "pre"}
    assert '<img src=x onerror="alert()"> <script>alert()</script>' in text
    assert "# no title, **not bold**" in text and "2 * 3" in text and "**bold" not in text
