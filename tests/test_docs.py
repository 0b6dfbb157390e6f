"""Documents name commands, flags and files that exist."""

import re
from pathlib import Path

import pytest

from medusa_jax.__main__ import COMMANDS, main
from medusa_jax.commands import decode as decode_command

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "medusa_jax" / "demo" / "README.md"
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), DEMO]
PAGES = [*TEXTS, *sorted((ROOT / "configs").glob("*.py"))]


def calls():
    """Every documented call of a command: (page, command, its flags)."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\\\n", " ").replace("\\\n", " ")
        for line in re.findall(
            r"(?:python[\w./]* )(-m\s+medusa_jax\s+\w+|\w+\.py)([^\n`|]*)", text
        ):
            name = re.split(r"\s+", line[0])[-1].removesuffix(".py")
            flags = re.findall(r"(?<!\S)(--\w+)", line[1])
            found.append((page.relative_to(ROOT).as_posix(), name, tuple(flags)))
    return sorted(set(found))


@pytest.fixture(scope="module")
def help_of():
    """Help texts by command, each asked for once."""
    texts = {}

    def ask(name, capsys):
        if name not in texts:
            try:
                main([name, "--help"])
            except SystemExit as end:
                assert end.code == 0
            texts[name] = capsys.readouterr().out
        return texts[name]

    return ask


@pytest.mark.parametrize(("page", "name", "flags"), calls())
def test_documented_calls_are_understood(page, name, flags, help_of, capsys):
    assert name in COMMANDS
    text = help_of(name, capsys)
    for flag in flags:
        known = flag in ("--config", "--workdir") or re.search(rf"{flag}\b", text)
        assert known, f"{page}: {name} has no {flag}"


def test_calls_are_found():
    """Else the test above would show little."""
    names = {name for _, name, _ in calls()}
    assert {"decode", "train", "calibrate", "bench", "distill", "family"} <= names
    assert len(calls()) > 20


def test_every_command_says_what_it_is_for(capsys):
    assert main([]) == 2
    listed = capsys.readouterr().out
    assert main(["--help"]) == 0 and capsys.readouterr().out == listed
    readme = (ROOT / "README.md").read_text()
    for name, (_, what) in COMMANDS.items():
        assert f"  {name} " in listed and what in listed
        assert f"`{name}`" in readme or name in ("demo_corpus", "ngrams")
    assert main(["decoed"]) == 2
    assert "did you mean 'decode'?" in capsys.readouterr().err


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: p.name)
def test_files_that_pages_name_are_there(page):
    """`room/file.py` and `room/file.py: name` in backticks."""
    for path, name in re.findall(r"`([\w/]+\.(?:py|md))(?:: (\w+))?", page.read_text()):
        places = [ROOT / path, ROOT / "medusa_jax" / path, ROOT / "docs" / path]
        there = [p for p in places if p.exists()]
        assert there, f"{page.name} names {path}"
        if name:
            assert re.search(rf"^ *(def |class |){name}\b", there[0].read_text(), re.M), (
                f"{path}: {name}"
            )


def anchors_of(page):
    """What headings can be linked to, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links {link}"
        if anchor:
            assert anchor in anchors_of(there), f"{page.name} links {link}"


def test_every_page_is_in_the_site():
    """Named in the navigation, which may name no page that is not there."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "mkdocs.yml").read_text()
    named = {page for entry in yaml.safe_load(text)["nav"] for page in entry.values()}
    assert named == {p.name for p in (ROOT / "docs").glob("*.md")}


def test_acceptance_rules_are_those_of_the_package():
    from medusa_jax.decoding.acceptance import RULES

    choices = decode_command.parser().format_help()
    assert all(rule in choices for rule in RULES)
