"""Source files as training text: selection, cleaning, split.

Everything here depends only on paths and contents, never on the order of a directory.
"""

import hashlib
import re
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from medusa_jax.errors import UserError

# Not code that a person would write or read: installed packages, generated tables, files
# that are broken on purpose.
SKIP_PARTS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings"})
SKIP_PATHS = re.compile(
    r"^(pydoc_data/topics|_sysconfigdata|config-|html/entities"
    r"|lib2to3/tests/data/|test/.*bad_?syntax|test/bad_|test/encoded_modules/)"
)
MIN_BYTES, MAX_BYTES = 200, 400_000
MAX_LINE = 400
MAX_NON_ASCII = 0.02
MAX_DIGITS = 0.12

# A paragraph with one of these words is a licence notice if it comes before a file's first line of
# code; elsewhere only the unmistakable form counts.
_HEAD_NOTICE = re.compile(
    r"copyright|licen[sc]e|all rights reserved|warrant|merchantab|redistribut"
    r"|permission\s+(to\s+use|is\s+hereby)|contributed\s+to\s+(the\s+)?psf",
    re.IGNORECASE,
)
_NOTICE = re.compile(r"copyright\s*(\(c\)|©|\d{4})", re.IGNORECASE)


@dataclass(frozen=True)
class SourceFile:
    """One document: path relative to the standard library, with "/", and cleaned text."""

    path: str
    text: str


def drop_licence(text: str) -> str:
    """`text` without licence paragraphs in comments and in the module docstring.

    A paragraph is a run of comment lines without an empty comment ("#") in it, or a run of
    non-blank lines in the docstring. Code is never touched.

        "# Copyright (c) 2001 A. Body\\n#\\n# Reads mail.\\nimport os\\n"
            -> "# Reads mail.\\nimport os\\n"
    """
    lines = text.split("\n")
    code_lines: list[str] = []
    at_head, i = True, 0
    while i < len(lines):
        stripped = lines[i].lstrip()
        if stripped.startswith("#"):
            j = i
            while j < len(lines) and len(lines[j].lstrip(" \t#")) > 0:
                if not lines[j].lstrip().startswith("#"):
                    break
                j += 1
            j = max(j, i + 1)
            paragraph = "\n".join(lines[i:j])
            if (_HEAD_NOTICE if at_head else _NOTICE).search(paragraph):
                # Also drop the empty comments after the notice.
                while j < len(lines) and lines[j].strip() == "#":
                    j += 1
            else:
                code_lines.extend(lines[i:j])
            i = j
            continue
        quote = re.match(r"[rRuU]?(\"\"\"|''')", lines[i]) if at_head else None
        if quote:
            j = i + 1
            if lines[i].count(quote[1]) == 1:
                while j < len(lines) and quote[1] not in lines[j]:
                    j += 1
                j = min(j + 1, len(lines))
            code_lines.extend(_docstring_without_notice(lines[i:j]))
            i = j
            continue
        at_head = at_head and not stripped
        code_lines.append(lines[i])
        i += 1
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(code_lines)).strip("\n") + "\n"


def _docstring_without_notice(lines: list[str]) -> list[str]:
    """Drop inner paragraphs that are notices; keep the first and the last line (quotes)."""
    paragraphs, paragraph = [], []
    for line in lines[1:-1] + [""]:
        if line.strip():
            paragraph.append(line)
            continue
        if not _HEAD_NOTICE.search("\n".join(paragraph)):
            paragraphs.extend([*paragraph, line])
        paragraph = []
    return lines[:1] + paragraphs[:-1] + lines[1:][-1:] if len(lines) > 1 else lines


def is_code(path: str, text: str) -> bool:
    """Whether a file is code and prose rather than a table.

    path: relative, with "/". Criteria (module constants): size, longest line, share of characters
    outside ASCII, share of digits, and a short list of paths.
    """
    if SKIP_PARTS.intersection(path.split("/")) or SKIP_PATHS.search(path):
        return False
    n = len(text)
    if not MIN_BYTES <= n <= MAX_BYTES or max(map(len, text.split("\n"))) > MAX_LINE:
        return False
    digits = sum(text.count(d) for d in "0123456789")
    non_ascii = len(text.encode()) - n
    return digits <= MAX_DIGITS * n and non_ascii <= MAX_NON_ASCII * n


def read_sources(root: Path) -> tuple[list[SourceFile], dict[str, int]]:
    """All usable files below `root`, sorted by path, and counts of skipped files by reason."""
    if not root.is_dir():
        raise UserError(f"{root} is not a directory: --root must be a standard library.")
    left_out = {"unreadable": 0, "not_code": 0, "duplicate": 0}
    files, digests = [], set()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if SKIP_PARTS.intersection(name.split("/")):
            continue
        try:
            # tokenize.open handles universal newlines and the coding cookie.
            with tokenize.open(path) as stream:
                text = stream.read().removeprefix("\ufeff")
            text.encode()
        except (SyntaxError, UnicodeError, OSError):
            left_out["unreadable"] += 1
            continue
        text = drop_licence(text.replace("\r\n", "\n").replace("\r", "\n"))
        if not is_code(name, text):
            left_out["not_code"] += 1
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in digests:
            left_out["duplicate"] += 1
            continue
        digests.add(digest)
        files.append(SourceFile(name, text))
    return files, left_out


def path_fraction(path: str) -> float:
    """A number in [0, 1) that depends only on the path; below `heldout` = held out."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:6], "big") / 2**48


def limit_files(files: list[SourceFile], limit_mb: float) -> list[SourceFile]:
    """A sample of at most `limit_mb` million characters (0 = all), in path order."""
    if limit_mb <= 0:
        return files
    # A different hash than the split's; otherwise a small budget would contain only held-out files.
    order = sorted(files, key=lambda f: path_fraction("limit:" + f.path))
    budget, picked = limit_mb * 1e6, []
    for file in order:
        if len(file.text) <= budget:
            budget -= len(file.text)
            picked.append(file)
    return sorted(picked, key=lambda f: f.path)


def distinct_lines(text: str) -> set[str]:
    """Lines long enough to identify their source."""
    return {s for line in text.split("\n") if len(s := line.strip()) >= 16}


def split_files(
    files: list[SourceFile], heldout: float
) -> tuple[list[SourceFile], list[SourceFile], list[str]]:
    """Return (train, heldout, names of files dropped as near-duplicates of a held-out one).

    heldout: expected share of files. A training file is dropped if it shares more than 30% of its
    distinct lines, or of a held-out file's, with that file. Lines in more than 20 files are ignored as
    idioms.
    """
    held_out = [f for f in files if path_fraction(f.path) < heldout]
    train = [f for f in files if path_fraction(f.path) >= heldout]
    if not held_out or not train:
        raise UserError(
            f"{len(files)} files are too few for a training and a held-out part: "
            "raise --limit_mb or --heldout."
        )
    lines = {f.path: distinct_lines(f.text) for f in files}
    n_files = Counter(line for text in lines.values() for line in text)
    lines = {p: {x for x in text if n_files[x] <= 20} for p, text in lines.items()}
    owners: dict[str, list[str]] = {}
    for file in held_out:
        for line in lines[file.path]:
            owners.setdefault(line, []).append(file.path)
    train_files, dropped = [], []
    for file in train:
        text = lines[file.path]
        common = Counter(p for line in text for p in owners.get(line, ()))
        is_near = any(
            n >= 5 and n > 0.3 * min(len(text), len(lines[p])) for p, n in common.items()
        )
        if is_near:
            dropped.append(file.path)
        else:
            train_files.append(file)
    return train_files, held_out, dropped
