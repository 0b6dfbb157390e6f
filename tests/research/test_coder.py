"""Prompts for a coder: where functions are cut, and what may not be trained on."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from medusa_jax.errors import UserError
from research.coder import answer
from research.coder.compose import held_out_windows, windows
from research.coder.functions import functions
from research.coder.sources import read_table

PYTHON = '''import os


def first(path):
    """Say something.

    More of it.
    """
    return os.stat(path)


def second():
    return 1
'''
GO = """package p

// Sum adds two numbers.
// It never fails.
func Sum(a int, b int) int {
	if a > b {
		return a + b
	}
	return b + a
}
"""


@pytest.mark.parametrize(
    "text, language, prompt, last",
    [
        (PYTHON, "python", PYTHON[PYTHON.index("def first") : PYTHON.index("    return os")], "path)\n"),
        (GO, "go", GO[GO.index("// Sum") : GO.index("\tif")], "return b + a\n}"),
    ],
)  # fmt: skip
def test_a_documented_function_is_cut_before_its_body(text, language, prompt, last):
    documented = [part for part in functions(text, language) if part.documented]
    assert [text[part.start : part.body] for part in documented] == [prompt]
    assert text[: documented[0].end].endswith(last)


def test_no_package_is_both_trained_on_and_held_out():
    table = read_table()
    assert len({source.folder for source in table}) == len(table)
    for language in {source.language for source in table}:
        packages = [source for source in table if source.language == language]
        held_out = [source for source in packages if source.held_out]
        assert len(held_out) == -(-len(packages) // 6)


def test_eight_words_in_a_row_are_found_in_any_field(tmp_path: Path):
    shared = "one two three four five six seven eight"
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"turns": ["a", f"{shared} nine"]}).encode()))
    barred = held_out_windows([str(path)])
    assert barred & windows("x = 1  # One two, three four five (six) seven eight")
    assert not barred & windows("one two three four five six seven")


def test_answers_travel_without_their_prompts(tmp_path: Path):
    prompts = [{"id": i, "prompt_ids": [i, 7], "temperature": 0} for i in range(64)]
    lines = [p | {"token_ids": [p["id"]], "finish": "eos"} for p in prompts]
    for number in range(2):
        text = "".join(json.dumps(x) + "\n" for x in lines[32 * number :][:32])
        (tmp_path / f"answers_{number:05d}.jsonl").write_text(text)
    answer.pack(tmp_path, tmp_path / "packed.jsonl.xz")
    assert b"prompt_ids" not in lzma.decompress((tmp_path / "packed.jsonl.xz").read_bytes())
    prompts[40]["prompt_ids"] = [40, 8]  # another version of its package
    paths = [tmp_path / "there_0", tmp_path / "there_1"]
    answer.unpack(tmp_path / "packed.jsonl.xz", [prompts[:32], prompts[32:]], paths)
    assert answer.read_lines(paths[0]) == lines[:32] and not paths[1].exists()


def test_there_must_be_answers_to_collect(tmp_path: Path):
    with pytest.raises(UserError, match="no answers in"):
        answer.collect(answer.Flags(model="", out="", held_out_files=""), tmp_path)
