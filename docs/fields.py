"""A hook of MkDocs: the tables of configuration.md, from the fields and their comments in the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from medusa_jax import arch, bounds, config

ROOT = Path(__file__).parents[1]
HEADS = ROOT / "medusa_jax" / "heads"
# Sections of `Config`: class, file, prefix of its fields on the command line.
SECTIONS = (
    ("Config", "config", ""),
    ("ModelConfig", "config", "model."),
    ("DataConfig", "config", "data."),
    ("OptimConfig", "config", "optim."),
    ("TrainConfig", "config", "train."),
    ("LoraConfig", "config", "lora."),
    ("HeadsConfig", "arch", "heads."),
    ("LlamaConfig", "arch", "model.arch."),
)
MARK = "<!-- fields -->"


class Field(NamedTuple):
    """A field of a dataclass: its name, its default, its values and the comment above it."""

    name: str
    default: str
    values: str
    comment: str


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in place of the page's mark."""
    return markdown.replace(MARK, tables())


def tables() -> str:
    """All tables, each under its heading."""
    parts = []
    for name, file, prefix in SECTIONS:
        parts.append(table(ROOT / "medusa_jax" / f"{file}.py", name, prefix))
    for path in sorted(HEADS.glob("*.py")):
        for node in classes(path):
            if node.name.endswith("Config"):
                parts.append(table(path, node.name, "heads."))
    return "\n\n".join(parts)


def table(path: Path, name: str, prefix: str) -> str:
    """A heading, the class's docstring and a row for each field."""
    [node] = [node for node in classes(path) if node.name == name]
    lines = [f"## {name}", "", ast.get_docstring(node) or "", ""]
    lines += ["| field | default | values | meaning |", "|---|---|---|---|"]
    for field in fields(node, path.read_text().splitlines()):
        values, comment = (x.replace("|", "\\|") for x in (field.values, field.comment))
        lines.append(f"| `{prefix}{field.name}` | {field.default} | {values} | {comment} |")
    return "\n".join(lines)


def classes(path: Path) -> list[ast.ClassDef]:
    """The classes of a file."""
    tree = ast.parse(path.read_text())
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def fields(node: ast.ClassDef, lines: list[str]) -> Iterator[Field]:
    """The fields of a class; those that are configurations have their own table."""
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or statement.value is None:
            continue
        default = ast.unparse(statement.value)
        if default.startswith("field("):
            continue
        name = ast.unparse(statement.target)
        comment = comment_above(lines, statement.lineno - 1)
        yield Field(name, f"`{default}`", values_of(statement.annotation), comment)


def comment_above(lines: list[str], index: int) -> str:
    """The comment in the lines before lines[index], as one line."""
    words: list[str] = []
    while lines[index - 1].strip().startswith("#"):
        index -= 1
        words.insert(0, lines[index].strip().removeprefix("#").strip())
    return " ".join(words)


def values_of(annotation: ast.expr) -> str:
    """The type and the bounds of a field, in words."""
    hint = eval(ast.unparse(annotation), vars(arch) | vars(config) | vars(bounds))
    kind = getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint
    words = getattr(kind, "__name__", str(kind))
    if words == "tuple":
        words = str(kind)
    for bound in getattr(hint, "__metadata__", ()):
        if isinstance(bound, bounds.OneOf):
            words = ", ".join(f'`"{name}"`' for name in bound.names)
        elif isinstance(bound, bounds.AtLeast):
            words += f", at least {bound.value}"
        elif isinstance(bound, bounds.AtMost):
            words += f", at most {bound.value}"
    return words
