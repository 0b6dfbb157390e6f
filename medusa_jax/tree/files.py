"""Trees by name: the values of `--tree`, and the tree file next to the heads."""

from collections.abc import Mapping
from pathlib import Path

from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.tree.tree import Order, Tree
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json, parse_json, read_text

# Trees with arguments after a colon.
FORMS = ("chain", "copy", "cartesian")
# Tree size on an accelerator that the calibrated order was not fitted to.
ACCELERATOR_NODES = 64


def load_tree_file(path: str | Path) -> Json:
    """Read a tree file: a JSON list of choices, or an object with `choices` (and evidence).

    Returns: the object; `growth` defaults to the choices in their order, `spares` to none.

    Raises:
      UserError: not readable, not JSON, neither of the two forms, no tree, or malformed evidence.
    """
    try:
        data = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"tree file {path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        data = {"choices": data}
    file = Fields(f"tree file {path}", {"growth": data.get("choices"), "spares": []} | data)
    for name in ("choices", "growth", "spares"):
        file.items(name, list)
    evidence = Fields(file.file, file.table("evidence"))
    for row in evidence.items("ladder", dict, []):
        size = Fields(f"{file.file}, ladder", row)
        size.count("nodes")
        size.number("tokens_per_step")
        size.number("step_latency_ratio", 1.0)
    for row in file.items("batches", dict, []):
        rung = Fields(f"{file.file}, batches", row)
        rung.count("batch")
        rung.count("nodes")
        for timed in rung.items("rows", dict, []):
            size = Fields(f"{rung.file}, rows", timed)
            size.count("nodes")
            size.number("step_latency_ratio")
    try:
        file_tree(file.values)
        tree_of_size(file.values, len(order_of(file.values).growth) + 1)
    except UserError as error:
        raise UserError(f"{file.file}: {error}") from error
    return file.values


def order_of(calibrated: Json) -> Order:
    """The order in which a tree file adds nodes."""
    growth = calibrated.get("growth") or calibrated["choices"]
    return Order(growth, calibrated.get("spares") or ())


def tree_of_size(calibrated: Json, n_nodes: int) -> Tree:
    """The first nodes of a tree file's order."""
    order = order_of(calibrated)
    n_max = len(order.growth) + 1
    if not 1 <= n_nodes <= n_max:
        raise UserError(
            f"cannot build a tree of {n_nodes} nodes: the calibrated order has 1 to "
            f"{n_max} (run `medusa calibrate` for more)"
        )
    return order.tree(n_nodes)


def auto_tree(calibrated: Json, platform: str) -> Tree:
    """Return the calibrated tree, resized if it was fitted to another platform.

    A CPU always uses the size in the file. An accelerator's step is bound by reading weights,
    so 64 nodes cost little more than one there (Medusa 2.3.3).

    Args:
      platform: "cpu", "gpu" or "tpu", as `jax.default_backend()` names it.
    """
    if platform in ("cpu", calibrated.get("platform")):
        return file_tree(calibrated)
    n_nodes = len(order_of(calibrated).growth) + 1
    return tree_of_size(calibrated, min(ACCELERATOR_NODES, n_nodes))


def file_tree(calibrated: Json) -> Tree:
    """The tree file's `choices`."""
    return Tree.from_choices(calibrated["choices"], calibrated.get("spares") or ())


def trees_by_rows(calibrated: Json, platform: str) -> dict[int, Tree]:
    """Return a tree file's trees by number of rows (`batches`); {} if none are for this platform.

    A CPU uses trees that were fitted to any platform, as in `auto_tree`.
    """
    if platform not in ("cpu", calibrated.get("platform")):
        return {}
    sizes = {rung["batch"]: rung["nodes"] for rung in calibrated.get("batches") or ()}
    return {rows: tree_of_size(calibrated, size) for rows, size in sizes.items()}


def tree_at(by_rows: Mapping[int, Tree], rows: int) -> Tree:
    """The tree for the next listed number of rows from `rows` on, or for the largest."""
    return by_rows[min((n for n in by_rows if n >= rows), default=max(by_rows))]


def parse_tree(spec: str, calibrated: Json | None, auto: Tree) -> Tree:
    """Return the tree that a `--tree` value names.

    Args:
      spec: "none", "auto", "bundled" (the tree file's own choice), a number of nodes (root
        included), "cartesian:2,3", "chain:4", "copy:4" (tokens copied from the text) or the path of
        a JSON file. The suffix "+copy:4" replaces the tree's copied chain.
      calibrated: content of the tree file next to the heads, for "bundled" (its `choices`) and a
        number (the first nodes of its `growth`).
      auto: the tree that "auto" means.
    """
    heads, and_copies, copies = spec.partition("+copy:")
    if and_copies and (heads.startswith("copy:") or "+copy:" in copies):
        raise UserError(f"--tree {spec}: copy is given twice")
    kind, _, argument = heads.partition(":")
    try:
        if and_copies:
            drafted = parse_tree(heads, calibrated, auto).drafted
            return Tree.from_choices([*drafted.choices, *Tree.copies(int(copies)).choices])
        if spec == "none":
            return Tree.none()
        if kind == "chain":
            return Tree.chain(int(argument))
        if kind == "copy":
            return Tree.copies(int(argument))
        if kind == "cartesian":
            return Tree.cartesian([int(w) for w in argument.split(",")])
    except ValueError as error:
        raise UserError(
            f"--tree {spec!r}: write chain:4, copy:4 or cartesian:2,3 with whole numbers"
        ) from error
    if spec == "auto":
        return auto
    if spec == "bundled" or spec.isdecimal():
        if calibrated is None:
            raise UserError(
                f"--tree {spec} needs a tree file next to draft heads, which `medusa calibrate` fits: "
                "without one give chain:4, copy:4, cartesian:2,3 or a file"
            )
        if spec.isdecimal():
            return tree_of_size(calibrated, int(spec))
        return file_tree(calibrated)
    if not spec:
        raise UserError("--tree is empty: name a tree, a number of nodes or a file")
    if not Path(spec).exists() and not Path(spec).suffix and "/" not in spec:
        names = (*FORMS, "none", "auto", "bundled")
        raise UserError(
            f"cannot read the tree file {spec}: no such file, and no tree's name (auto, bundled, "
            f"none, a number of nodes, chain:4, copy:4, cartesian:2,3){did_you_mean(kind, names)}"
        )
    return file_tree(load_tree_file(spec))
