"""`python -m research coder_compose`: prompts for a coder, cut from the files of permissive packages.

Four kinds, in every ten prompts five, two, two and one:

    middle     Qwen's fill in the middle: <|fim_prefix|> 50 to 400 tokens <|fim_suffix|> 0 to 200 tokens
               <|fim_middle|>; the cursor is anywhere in a line, at its end, or after the next line's indent
    function   a function's documentation and first line, half of them after the lines above it
    edit       a conversation: change, test, explain or repair a short function
    question   a conversation: a question about a function of a library

Each prompt follows from its number alone: the language, the package, the file and the cut are random draws
of a generator seeded with it. One that shares eight words in a row with a held-out question is left out.
Every second ten are to be answered at temperature 0, the others at 0.7.
"""

import functools
import gzip
import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.console import inform
from medusa_jax.text.chat import encode_prompt
from medusa_jax.text.tokenizer import Tokenizer, load_tokenizer
from medusa_jax.whole_files import Json, write_text
from research.coder.functions import Function, functions
from research.coder.sources import Source, read_table

EXAMPLES = """examples:
  python -m research coder_sources
  python -m research coder_compose --model qwen.gguf --held_out_files human_eval.jsonl.gz
"""

KINDS = ["middle"] * 5 + ["function"] * 2 + ["edit"] * 2 + ["question"]
MOST_NEW = {"middle": 96, "function": 128, "edit": 256, "question": 256}
LANGUAGES = {"python": 40, "javascript": 22, "go": 12, "c": 10, "rust": 10, "markdown": 6}
SUFFIXES = {
    "python": (".py",), "javascript": (".js", ".mjs", ".ts", ".tsx", ".jsx"), "go": (".go",),
    "c": (".c", ".h"), "rust": (".rs",), "markdown": (".md", ".markdown"),
}  # fmt: skip
NAMES = {
    "python": "Python",
    "javascript": "JavaScript",
    "go": "Go",
    "c": "C",
    "rust": "Rust",
}
# Folders of other people's code, of bundles, of data and of packaging.
PASSED_OVER = re.compile(
    r"/(vendor|third_party|_?vendored|node_modules|deps|dist|umd|bundles?|min|debian|testdata|fixtures|"
    r"locales?|migrations|cjs|i18n|lang|[\w.-]*dist-info)/|\.min\.|\.d\.[cm]?ts$|_pb2"
)
# Other licences, and generated files.
REFUSED = re.compile(
    r"General Public|GPL|Mozilla Public|DO NOT EDIT|[gG]enerated by|@generated"
)
LICENCE = 4000  # characters from the start in which these are looked for
MOST_FILES = 250  # of a package in one language

EDITS = (
    "Rename the function `{name}` to `{new}` and update its body where needed.",
    "Rename the variable names in this function so that they are easier to read.",
    "Add a parameter `{parameter}` to this function and use it sensibly.",
    "Write a unit test for this function.",
    "Write tests for `{name}`, including edge cases.",
    "Explain what this function does.",
    "Explain this code step by step.",
    "Add a comment to every important line.",
    "Write documentation for this function in the usual style of {language}.",
    "Is there a bug in this function? If so, fix it.",
    "Fix this function so that it handles invalid input, and return only the code.",
    "Refactor this function to be shorter without changing what it does.",
    "Make this function faster if you can.",
    "Add error handling.",
    "Add logging to this function.",
    "Rewrite this in {other}.",
    "Add types to this function where they are missing.",
    "Split this function into two smaller functions.",
    "Show how to call `{name}` with an example.",
    "What does `{name}` return, and when?",
)
QUESTIONS = (
    "How do I use `{name}` from {package} in {language}?",
    "What does `{name}` of {package} do?",
    "Show a short {language} example with `{name}` ({package}).",
    "What is the difference between `{name}` and `{second}` in {package}?",
    "When should I call `{name}` and when `{second}` ({package}, {language})?",
    "Write a {language} function like `{name}` of {package} without the library.",
    "Which errors can `{name}` in {package} cause, and how do I handle them?",
    "How would you test code that calls `{name}` from {package}?",
    "Write a small {language} program that uses {package} and calls `{name}`.",
    "I get wrong results from `{name}` ({package}). What should I check?",
)
PARAMETERS = (
    "timeout", "limit", "verbose", "default", "encoding", "retries", "callback", "strict", "key",
    "reverse", "prefix", "depth",
)  # fmt: skip
WORD = re.compile(r"\w+")
WORDS = 8  # in a row that a prompt may not share with a held-out question
MOST_TOKENS = 700  # of a prompt
TRIES = 50  # draws before a number is given up


@dataclass(frozen=True)
class File:
    """A text of a package; `path` is relative to the package's folder."""

    source: Source
    path: str
    text: str


@dataclass(frozen=True)
class Library:
    """The files of one package in one language."""

    source: Source
    files: tuple[File, ...]

    def draw(self, rng: random.Random) -> tuple[File, list[Function]]:
        """A random file and its functions."""
        file = rng.choice(self.files)
        return file, functions_of(file)


@functools.cache
def functions_of(file: File) -> list[Function]:
    return functions(file.text, file.source.language)


def read_files(
    root: Path, source: Source, language: str, hashes: set[str]
) -> Iterator[File]:
    """The usable files of a package, at most about `MOST_FILES`, chosen by the digest of their names.

    Args:
      hashes: the digests of texts that occurred before; those of these files are added.
    """
    folder = root / source.folder
    names = [
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, files in os.walk(folder)
        for name in files
        if name.endswith(SUFFIXES[language])
    ]
    names = [name for name in names if not PASSED_OVER.search(f"/{name}")]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    for name in names[:MOST_FILES]:
        path = folder / name
        if path.is_symlink() or not 600 < path.stat().st_size < 80_000:
            continue
        text = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
        lines = text.split("\n")
        too_wide = max(map(len, lines)) > (1000 if language == "markdown" else 180)
        digest = hashlib.sha256(text.encode()).hexdigest()
        is_refused = REFUSED.search(text[:LICENCE]) or "<|" in text or "\ufffd" in text
        if too_wide or len(lines) < 15 or is_refused or digest in hashes:
            continue
        hashes.add(digest)
        yield File(source, name, text)


def libraries(root: Path, sources: Sequence[Source]) -> dict[str, list[Library]]:
    """By language, the packages with usable files; Markdown comes from all packages."""
    by_language: dict[str, list[Library]] = {language: [] for language in LANGUAGES}
    digests: set[str] = set()
    for source in sources:
        for language in (source.language, "markdown"):
            files = tuple(read_files(root, source, language, digests))
            if files:
                by_language[language].append(Library(source, files))
    return by_language


def ids_of_middle(text: str, tokenizer: Tokenizer, rng: random.Random) -> list[int] | None:
    """A prompt with the cursor somewhere in the text, up to eight lines before the suffix."""
    at = rng.randrange(len(text) // 10, len(text))
    place = rng.choice(("inside", "inside", "line end", "next line"))
    if place != "inside":
        at = text.find("\n", at)
        if at < 0:
            return None
    if place == "next line":
        at += len(re.match(r"\n[ \t]*", text[at:])[0])  # type: ignore[index]
    end = at
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 8))):
        end = text.find("\n", end + 1)
        if end < 0:
            end = len(text)
            break
    before_ids = tokenizer.encode(text[max(0, at - 3000) : at])[-rng.randint(50, 400) :]
    after_ids = tokenizer.encode(text[end : end + 1500])[: max(0, rng.randint(-25, 200))]
    if len(before_ids) < 50:
        return None
    marks = [
        tokenizer.token_to_id(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")
    ]
    prefix, suffix, middle = (i for i in marks if i is not None)
    return [prefix, *before_ids, suffix, *after_ids, middle]


def ids_of_function(
    library: Library, tokenizer: Tokenizer, rng: random.Random
) -> tuple[list[int], str] | None:
    """Documentation and first line of a function, and the file's path."""
    file, parts = library.draw(rng)
    parts = [part for part in parts if part.documented]
    if not parts:
        return None
    part = rng.choice(parts)
    start = part.start
    if rng.random() < 0.5:
        start = max(0, start - rng.randint(200, 1200))
        start = file.text.find("\n", start) + 1
    ids = tokenizer.encode(file.text[min(start, part.start) : part.body])
    return ids, file.path


def talk_about(library: Library, kind: str, rng: random.Random) -> tuple[str, str] | None:
    """A user's message about a function, and the file's path."""
    file, parts = library.draw(rng)
    if kind == "question":
        parts = [part for part in parts if not part.name.startswith("_")]
    else:
        parts = [part for part in parts if part.short]
    if not parts:
        return None
    part, second = rng.choice(parts), rng.choice(parts)
    language = NAMES[library.source.language]
    languages = [name for name in NAMES.values() if name != language]
    gaps = {
        "name": part.name, "second": second.name, "new": f"{rng.choice(PARAMETERS)}_{part.name}",
        "parameter": rng.choice(PARAMETERS), "language": language, "other": rng.choice(languages),
        "package": library.source.package,
    }  # fmt: skip
    if kind == "question":
        return rng.choice(QUESTIONS).format(**gaps), file.path
    code = file.text[part.start : part.end].strip("\n")
    block = f"```{library.source.language}\n{code}\n```"
    task = rng.choice(EDITS).format(**gaps)
    return (f"{task}\n\n{block}" if rng.random() < 0.7 else f"{block}\n\n{task}"), file.path


def windows(text: str) -> set[int]:
    """Hashes of all runs of `WORDS` words."""
    words = WORD.findall(text.lower())
    return {hash(tuple(words[i : i + WORDS])) for i in range(len(words) - WORDS + 1)}


def held_out_windows(paths: Sequence[str]) -> set[int]:
    """The word runs of all texts in files of JSON lines, packed or not."""
    hashes: set[int] = set()
    for path in paths:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
        for line in text.splitlines():
            for value in json.loads(line).values():
                texts = value if isinstance(value, list) else [value]
                hashes.update(*(windows(text) for text in texts if isinstance(text, str)))
    return hashes


class Composer:
    """Makes the prompt of each number.

    Attributes:
      dropped: numbers of draws left out, by the reason.
    """

    def __init__(
        self, by_language: dict[str, list[Library]], tokenizer: Tokenizer, barred: set[int]
    ):
        self.by_language, self.tokenizer, self.barred = by_language, tokenizer, barred
        self.dropped: Counter[str] = Counter()

    def compose(self, number: int) -> Json | None:
        """The prompt of this number; None if no draw gives one."""
        rng, kind = random.Random(number), KINDS[number % len(KINDS)]
        for _ in range(TRIES):
            shares = {
                k: n for k, n in LANGUAGES.items() if kind == "middle" or k != "markdown"
            }
            language = rng.choices(list(shares), list(shares.values()))[0]
            candidates = self.by_language[language]
            weights = [len(library.files) ** 0.5 for library in candidates]
            library = rng.choices(candidates, weights)[0]
            sample = self.draw(library, kind, rng)
            if sample is None or len(sample[0]) > MOST_TOKENS:
                self.dropped["unusable"] += 1
                continue
            ids, path = sample
            if not self.barred.isdisjoint(windows(self.tokenizer.decode(ids))):
                self.dropped["shares eight words with a held-out question"] += 1
                continue
            source = library.source
            return {
                "id": number, "kind": kind, "language": language, "file": path,
                "package": source.package, "version": source.version, "licence": source.licence,
                "temperature": 0.7 if number // len(KINDS) % 2 else 0.0,
                "max_new_tokens": MOST_NEW[kind], "prompt_ids": ids,
            }  # fmt: skip
        return None

    def draw(
        self, library: Library, kind: str, rng: random.Random
    ) -> tuple[list[int], str] | None:
        """Token ids of one prompt and the file's path, or None if this draw is unusable."""
        if kind == "middle":
            file = rng.choice(library.files)
            ids = ids_of_middle(file.text, self.tokenizer, rng)
            return (ids, file.path) if ids else None
        if kind == "function":
            return ids_of_function(library, self.tokenizer, rng)
        turns = talk_about(library, kind, rng)
        if turns is None:
            return None
        message = {"role": "user", "content": turns[0]}
        return encode_prompt(self.tokenizer, [message], ""), turns[1]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Write prompts for a coder, one a line."""

    model: str = flag("whose tokenizer and chat template")
    n: int = flag("numbers to compose", 12_000, type=at_least(1))
    sources: str = flag("directory of `coder_sources`", "work/coder/sources")
    held_out: bool = flag(
        "from the packages that are held out, instead of the others", False
    )
    held_out_files: tuple[str, ...] = flag(
        "files of JSON lines, with commas between, to share nothing with", ()
    )
    out: str = flag("file to write", "work/coder/prompts.jsonl")


def run(flags: Flags) -> int:
    """Write one line per prompt and say what they come from."""
    sources = [s for s in read_table() if bool(s.held_out) == flags.held_out]
    barred = held_out_windows(flags.held_out_files)
    by_language = libraries(Path(flags.sources), sources)
    composer = Composer(by_language, load_tokenizer(flags.model), barred)
    by_ids: dict[tuple[int, ...], Json] = {}
    for number in range(flags.n):
        prompt = composer.compose(number)
        if prompt:
            by_ids.setdefault(tuple(prompt["prompt_ids"]), prompt)
    prompts = list(by_ids.values())
    out = Path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, "".join(json.dumps(prompt) + "\n" for prompt in prompts))
    for field in ("kind", "language", "licence"):
        inform(
            f"{field}: {dict(Counter(prompt[field] for prompt in prompts).most_common())}"
        )
    tokens = sum(len(prompt["prompt_ids"]) for prompt in prompts)
    inform(f"draws left out: {dict(composer.dropped)}")
    inform(f"wrote {len(prompts)} prompts with {tokens} tokens to {out}")
    return 0


main = CommandLine("python -m research coder_compose", Flags, run, EXAMPLES)
