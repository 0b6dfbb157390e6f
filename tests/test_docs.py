"""Documents name commands, flags, files, anchors and objects that exist."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from medusa_jax.__main__ import COMMANDS, main
from medusa_jax.commands.by_name import run_named
from medusa_jax.config import Config, fields_of
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class
from research.__main__ import COMMANDS as RESEARCH

ROOT = Path(__file__).parents[1]
SITE = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *SITE, ROOT / "medusa_jax" / "demo" / "README.md"]
# Of its day: only its links are checked.
LOG = sorted((ROOT / "research" / "log").glob("*.md"))
# As pages call them: `python -m research family`, `medusa serve`.
ALL = COMMANDS | {f"research {name}": command for name, command in RESEARCH.items()}
CALL = r"(?:python[\w./]* |(?<![^\n`&]) *(?=medusa )|srun )(-m\s+research\s+\w+|\w+\.py|medusa \w+)([^\n`|]*)"


def calls():
    """Every documented call of a command: (page, command, its flags)."""
    for page in [*PAGES, *sorted((ROOT / "configs").glob("*.py"))]:
        text = page.read_text().replace("\\\\\n", " ").replace("\\\n", " ")
        for program, arguments in re.findall(CALL, text):
            name = program.removesuffix(".py").removeprefix("-m ").split()
            name = " ".join(name[name[0] == "medusa" :])
            flags = re.findall(r"(?<!\S)(--\w+)", arguments)
            yield page.relative_to(ROOT).as_posix(), name, tuple(flags)


@pytest.fixture(scope="module")
def help_of():
    """Help texts by command, each printed once."""
    texts = {}

    def ask(name, capsys):
        if name not in texts:
            try:
                run_named("", ALL, [name, "--help"])
            except SystemExit as end:
                assert end.code == 0
            texts[name] = capsys.readouterr().out
        return texts[name]

    return ask


@pytest.mark.parametrize(("page", "name", "flags"), sorted(set(calls())))
def test_documented_calls_are_understood(page, name, flags, help_of, capsys):
    assert name in ALL
    text = help_of(name, capsys)
    for flag in flags:
        known = flag in ("--config", "--workdir") or re.search(rf"{flag}\b", text)
        assert known, f"{page}: {name} has no {flag}"


def test_every_command_is_listed(capsys):
    assert main([]) == 2
    listed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in listed and command.what in listed
    assert main(["decoed"]) == 2
    assert "'decode'" in capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_pages_name_exist(page):
    """`room/file.py`, `room/file.py: name` in backticks, and tests in commands."""
    text = page.read_text()
    named = re.findall(r"`([\w/]+\.(?:py|md))(?:: (\w+))?", text)
    named += [(test, "") for test in re.findall(r"tests/[\w/]+\.py", text)]
    for path, name in named:
        places = [ROOT / path, ROOT / "medusa_jax" / path, ROOT / "docs" / path]
        found = [place for place in places if place.exists()]
        assert found, f"{page.name} names {path}"
        definition = rf"^ *(def |class |){name}\b"
        defined = not name or re.search(definition, found[0].read_text(), re.M)
        assert defined, f"{page.name} names {path}: {name}"


def anchors_of(page):
    """Anchors of the page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [*PAGES, *LOG], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name} links {link}"


def test_every_field_of_a_configuration_is_on_its_page():
    """With its comment; the drafters' fields, too."""
    path = ROOT / "docs" / "fields.py"
    spec = importlib.util.spec_from_file_location("fields", path)
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = (ROOT / "docs" / "configuration.md").read_text()
    shown = hook.on_page_markdown(page)
    assert hook.MARK in page and hook.MARK not in shown
    for name, _, _ in fields_of(Config()):
        assert f"| `{name}` |" in shown, name
    for drafter in DRAFTERS:
        for field in dataclasses.fields(drafter_class(drafter).Config):
            assert f"| `heads.{field.name}` |" in shown, field.name
    assert (
        "warmup_steps` | `40` | int, at least -1 | Steps of a linear warm-up; -1 = a twentieth"
        in shown
    )
