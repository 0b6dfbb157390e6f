"""Which source files become training text, on made-up files."""

import pytest

from research.demo import sources
from research.demo.sources import SourceFile

OWNED, READS = "# Copyright (c) 2001 A. Body\n", '"""Reads."""\n\n'
SLOWLY = '"""Reads.\n\nSlowly.\n"""\nx = 1\n'


@pytest.mark.parametrize(
    "before, after",
    [
        (f"{OWNED}#\n# Reads mail.\nimport os\n", "# Reads mail.\nimport os\n"),
        (f'"""Reads.\n\n{OWNED}Licensed to nobody.\n\nSlowly.\n"""\nx = 1\n', SLOWLY),
        (f"{READS}# Licensed under terms.\nimport os\n", f"{READS}import os\n"),
        ("import os\n\n\n# the license of a driver\n", None),
        ("import os\n# Copyright 2001 A. Body\nx = 1\n", "import os\nx = 1\n"),
        ('def f():\n    """Show the license."""\n', None),
        ("#!/usr/bin/env python\n# Reads.\n#\n# More.\nx = 1\n", None),
        ("'''Unfinished copyright\n", None),
    ],
)
def test_drop_licence(before, after):
    assert sources.drop_licence(before) == (before if after is None else after)


def test_near_duplicates_of_heldout_files_leave_training():
    def words(name, n):
        return "".join(f"{name} says this on line {i}\n" for i in range(n))

    files = [SourceFile(f"{i}.py", words(i, 40)) for i in range(60)]
    train, held, dropped = sources.split_files(files, 0.1)
    assert held and not dropped and len(train) + len(held) == 60
    copy = SourceFile("copy.py", held[0].text + words("another", 20))
    part = SourceFile("part.py", held[0].text[:200] + words("more", 40))
    assert sources.path_fraction("copy.py") > 0.1 < sources.path_fraction("part.py")
    train, held, dropped = sources.split_files([*files, copy, part], 0.1)
    assert dropped == ["copy.py"]
    assert part in train and copy not in train + held
