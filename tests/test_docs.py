"""Documents name commands, flags and files that exist."""

import inspect
import json
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

from medusa_jax.__main__ import COMMANDS, main
from medusa_jax.commands import decode as decode_command
from medusa_jax.commands.bench import COMMANDS as BENCH
from medusa_jax.console import run_named
from research.__main__ import COMMANDS as RESEARCH

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "medusa_jax" / "demo" / "README.md"
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), DEMO]
# As pages call them: `python -m research family`.
ALL = COMMANDS | {f"research {name}": command for name, command in RESEARCH.items()}
ALL |= {f"bench {name}": command for name, command in BENCH.items()}
PAGES = [*TEXTS, *sorted((ROOT / "configs").glob("*.py"))]


def calls():
    """Every documented call of a command: (page, command, its flags)."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\\\n", " ").replace("\\\n", " ")
        for line in re.findall(
            r"(?:python[\w./]* )(-m\s+(?:medusa_jax(?:\s+bench)?|research)\s+\w+|\w+\.py)([^\n`|]*)",
            text,
        ):
            name = " ".join(line[0].split()[1:]).removesuffix(".py").removeprefix(
                "medusa_jax "
            ) or line[0].removesuffix(".py")
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
                run_named("", ALL, [name, "--help"])
            except SystemExit as end:
                assert end.code == 0
            texts[name] = capsys.readouterr().out
        return texts[name]

    return ask


@pytest.mark.parametrize(("page", "name", "flags"), calls())
def test_documented_calls_are_understood(page, name, flags, help_of, capsys):
    assert name in ALL
    text = help_of(name, capsys)
    for flag in flags:
        known = flag in ("--config", "--workdir") or re.search(rf"{flag}\b", text)
        assert known, f"{page}: {name} has no {flag}"


def test_calls_are_found():
    """Else the test above would show little."""
    names = {name for _, name, _ in calls()}
    assert {
        "decode",
        "train",
        "calibrate",
        "bench race",
        "distill",
        "research family",
    } <= names
    assert len(calls()) > 20


def test_every_command_says_what_it_is_for(capsys):
    assert main([]) == 2
    listed = capsys.readouterr().out
    assert main(["--help"]) == 0 and capsys.readouterr().out == listed
    readme = (ROOT / "README.md").read_text()
    for name, command in COMMANDS.items():
        assert f"  {name} " in listed and command.what in listed
        assert f"`{name}`" in readme
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


def pages_of(nav):
    """Files of the site's navigation, groups opened; addresses elsewhere left out."""
    for entry in nav:
        for target in entry.values():
            if isinstance(target, list):
                yield from pages_of(target)
            elif not target.startswith("https://"):
                yield target


def test_every_page_is_in_the_site_once():
    """Named in the navigation, which may name no page that does not exist."""
    yaml = pytest.importorskip("yaml")
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_of(nav)) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))
    assert len({name for entry in nav for name in entry}) == len(nav)


DOCUMENTED = re.findall(r"^::: (medusa_jax\.\S+)", (ROOT / "docs/api.md").read_text(), re.M)


def documented_functions(name):
    """An object of the API page with the methods shown there: (its name, the object)."""
    thing = pkgutil.resolve_name(name)
    yield name, thing
    if inspect.isclass(thing):
        for member, method in inspect.getmembers(thing, inspect.isroutine):
            if not member.startswith("_"):
                yield f"{name}.{member}", method


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_arguments_exist(name):
    """One entry of `Args:` for each parameter: two names in one entry fail the site's build.

    So does a section that begins in the line of its title and goes on below it.
    """
    for one, thing in documented_functions(name):
        text = inspect.cleandoc(thing.__doc__ or "")
        begun = re.search(r"^(Args|Returns|Raises): .*\n +\S", text, re.M)
        assert not begun, f"{one}: {begun[0]}"
        args = re.search(r"^Args:\n((?:(?:  .*)?\n)*)", text + "\n", re.M)
        entries = re.findall(r"^  (?! )([^:\n]+):", args[1], re.M) if args else []
        assert not entries or set(entries) <= set(inspect.signature(thing).parameters), one


def test_the_repository_has_one_address():
    """The site and the notebooks (their badges and install cells) give pyproject.toml's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project["urls"]["Repository"]
    owner_and_name = address.removeprefix("https://github.com/")
    assert f"Repository: {address}\n" in (ROOT / "mkdocs.yml").read_text()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        first, install = json.loads(notebook.read_text())["cells"][:2]
        badge = (
            "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
            "(https://colab.research.google.com/github/"
            f"{owner_and_name}/blob/main/notebooks/{notebook.name})"
        )
        assert badge in "".join(first["source"]), notebook.name
        assert f'REPOSITORY = "{address}"\n' in install["source"], notebook.name


def test_acceptance_rules_are_those_of_the_package():
    from medusa_jax.decoding.acceptance import RULES

    choices = decode_command.main.parser().format_help()
    assert all(rule in choices for rule in RULES)
