"""Documents name commands, flags, files, anchors and objects that exist."""

import inspect
import json
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

from medusa_jax.__main__ import COMMANDS, main
from medusa_jax.commands.bench import COMMANDS as BENCH
from medusa_jax.console import run_named
from research.__main__ import COMMANDS as RESEARCH

ROOT = Path(__file__).parents[1]
SITE = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *SITE, ROOT / "medusa_jax" / "demo" / "README.md"]
LOG = sorted(
    (ROOT / "research" / "log").glob("*.md")
)  # of its day: only its links are checked
# As pages call them: `python -m research family`.
ALL = COMMANDS | {f"research {name}": command for name, command in RESEARCH.items()}
ALL |= {f"bench {name}": command for name, command in BENCH.items()}
CALL = (
    r"(?:python[\w./]* )(-m\s+(?:medusa_jax(?:\s+bench)?|research)\s+\w+|\w+\.py)([^\n`|]*)"
)


def calls():
    """Every documented call of a command: (page, command, its flags)."""
    for page in [*PAGES, *sorted((ROOT / "configs").glob("*.py"))]:
        text = page.read_text().replace("\\\\\n", " ").replace("\\\n", " ")
        for program, arguments in re.findall(CALL, text):
            name = program.removesuffix(".py").removeprefix("-m ").split()
            name = " ".join(name[name[0] == "medusa_jax" :])
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
    assert all(
        f"  {name} " in listed and COMMANDS[name].what in listed for name in COMMANDS
    )
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
        defined = not name or re.search(
            rf"^ *(def |class |){name}\b", found[0].read_text(), re.M
        )
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


def pages_of(nav):
    """Files of the site's navigation, groups opened; other sites left out."""
    for entry in nav:
        for target in entry.values():
            if isinstance(target, list):
                yield from pages_of(target)
            elif not target.startswith("https://"):
                yield target


def test_every_page_is_in_the_site_once():
    yaml = pytest.importorskip("yaml")
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_of(nav)) == [page.name for page in SITE]


def documented():
    """Objects of the API page with their public methods: (name, object)."""
    page = (ROOT / "docs" / "api.md").read_text()
    for name in re.findall(r"^::: (medusa_jax\.\S+)", page, re.M):
        thing = pkgutil.resolve_name(name)
        yield name, thing
        if inspect.isclass(thing):
            for member, method in inspect.getmembers(thing, inspect.isroutine):
                if not member.startswith("_"):
                    yield f"{name}.{member}", method


def test_documented_arguments_exist():
    """One entry of `Args:` for each parameter: two names in one entry fail the site's build.

    A section whose first line has text and that continues below fails it, too.
    """
    for name, thing in documented():
        text = inspect.cleandoc(thing.__doc__ or "")
        begun = re.search(r"^(Args|Returns|Raises): .*\n +\S", text, re.M)
        assert not begun, f"{name}: {begun[0]}"
        args = re.search(r"^Args:\n((?:(?:  .*)?\n)*)", text + "\n", re.M)
        entries = re.findall(r"^  (?! )([^:\n]+):", args[1], re.M) if args else []
        assert not entries or set(entries) <= set(inspect.signature(thing).parameters), name


def test_the_repository_has_one_address():
    """The site and the notebooks (their badges and install cells) give pyproject.toml's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project["urls"]["Repository"]
    owner_and_name = address.removeprefix("https://github.com/")
    assert f"Repository: {address}\n" in (ROOT / "mkdocs.yml").read_text()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        first, install = json.loads(notebook.read_text())["cells"][:2]
        badge = f"github/{owner_and_name}/blob/main/notebooks/{notebook.name})"
        assert badge in "".join(first["source"]), notebook.name
        assert f'REPOSITORY = "{address}"\n' in install["source"], notebook.name
