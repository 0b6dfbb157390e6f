"""Trees by name: the values of `--tree`, and the tree file next to the heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.tree.tree import Order, Tree
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json, parse_json, read_text

# Trees with arguments after a colon.
FORMS = ("chain", "copy", "cartesian")
# Tree size on an accelerator that the calibrated order was not fitted to.
ACCELERATOR_NODES = 64


@dataclass(frozen=True)
class Rung:
    """What `calibrate` found for a number of rows.

    Attributes:
      nodes: of the fastest tree.
      ratio_by_nodes: times of steps with trees of these sizes over a plain step's.
    """

    nodes: int
    ratio_by_nodes: Mapping[int, float]


@dataclass(frozen=True)
class TreeFile:
    """A tree, the order of nodes that it was taken from, and what was measured.

    Attributes:
      order: the order in which nodes are added.
      tree: the chosen tree.
      platform: what the tree was fitted to, as `jax.default_backend()` names it.
      mark: of the model and machine whose steps were timed.
      acceptance: the rule of these steps.
      tokens_by_nodes: tokens per step on other texts, by size.
      batches: rungs by number of rows.
      content: the whole file.
    """

    order: Order
    tree: Tree
    platform: str | None
    mark: str | None
    acceptance: str | None
    tokens_by_nodes: Mapping[int, float]
    batches: Mapping[int, Rung]
    content: Json

    @classmethod
    def read(cls, path: str | Path) -> "TreeFile":
        """Read a JSON list of choices, or an object with `choices` (and evidence).

        `growth` defaults to the choices in their order, `spares` to none.

        Raises:
          UserError: not readable, not JSON, neither of the two forms, no tree, or malformed evidence.
        """
        try:
            data = parse_json(read_text(path))
        except ValueError as error:
            raise UserError(f"tree file {path} is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            data = {"choices": data}
        data = {"growth": data.get("choices"), "spares": []} | data
        file = Fields(f"tree file {path}", data)
        choices, growth, spares = (
            file.items(name, list) for name in ("choices", "growth", "spares")
        )
        evidence, tokens = Fields(file.file, file.table("evidence")), {}
        for row in evidence.items("ladder", dict, []):
            size = Fields(f"{file.file}, ladder", row)
            tokens[size.count("nodes")] = size.number("tokens_per_step")
            size.number("step_latency_ratio", 1.0)
        batches = {}
        for row in file.items("batches", dict, []):
            rung = Fields(f"{file.file}, batches", row)
            rows, nodes = rung.count("batch"), rung.count("nodes")
            timed = [Fields(f"{rung.file}, rows", r) for r in rung.items("rows", dict, [])]
            ratios = {r.count("nodes"): r.number("step_latency_ratio") for r in timed}
            batches[rows] = Rung(nodes, ratios)
        order = Order(growth or choices, spares)
        try:
            tree = Tree.from_choices(choices, spares)
            order.tree(len(order.growth) + 1)
        except UserError as error:
            raise UserError(f"{file.file}: {error}") from error
        platform, mark, rule = map(data.get, ("platform", "mark", "acceptance"))
        return cls(order, tree, platform, mark, rule, tokens, batches, data)

    def of_size(self, n_nodes: int) -> Tree:
        """The first nodes of the order."""
        n_max = len(self.order.growth) + 1
        if not 1 <= n_nodes <= n_max:
            raise UserError(
                f"cannot build a tree of {n_nodes} nodes: the calibrated order has 1 to "
                f"{n_max} (run `medusa calibrate` for more)"
            )
        return self.order.tree(n_nodes)

    def for_platform(self, platform: str) -> Tree:
        """The chosen tree, or the first nodes of the order if it was fitted to another platform.

        A CPU always uses the size in the file. An accelerator's step is bound by reading weights,
        so 64 nodes cost little more than one there (Medusa 2.3.3).
        """
        fits = platform in ("cpu", self.platform)
        return self.tree if fits else self.order.tree(ACCELERATOR_NODES)

    def by_rows(self, platform: str) -> dict[int, Tree]:
        """Trees by number of rows, on a CPU those that were fitted to any platform; {} if there are none."""
        fits = platform in ("cpu", self.platform)
        return {n: self.of_size(rung.nodes) for n, rung in self.batches.items() if fits}


def parse_tree(spec: str, file: TreeFile | None, auto: Tree) -> Tree:
    """Return the tree that a `--tree` value names.

    Args:
      spec: "none", "auto", "bundled" (the tree file's own choice), a number of nodes (root
        included), "cartesian:2,3", "chain:4", "copy:4" (tokens copied from the text) or the path of
        a JSON file. The suffix "+copy:4" replaces the tree's copied chain.
      file: the tree file next to the heads, for "bundled" (its tree) and a number (the first nodes
        of its order).
      auto: the tree that "auto" means.
    """
    heads, and_copies, copies = spec.partition("+copy:")
    if and_copies and (heads.startswith("copy:") or "+copy:" in copies):
        raise UserError(f"--tree {spec}: copy is given twice")
    kind, _, argument = heads.partition(":")
    try:
        if and_copies:
            drafted = parse_tree(heads, file, auto).drafted
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
        if file is None:
            raise UserError(
                f"--tree {spec} needs a tree file next to draft heads, which `medusa calibrate` fits: "
                "without one give chain:4, copy:4, cartesian:2,3 or a file"
            )
        return file.of_size(int(spec)) if spec.isdecimal() else file.tree
    if not spec:
        raise UserError("--tree is empty: name a tree, a number of nodes or a file")
    if not Path(spec).exists() and not Path(spec).suffix and "/" not in spec:
        names = (*FORMS, "none", "auto", "bundled")
        raise UserError(
            f"cannot read the tree file {spec}: no such file, and no tree's name (auto, bundled, "
            f"none, a number of nodes, chain:4, copy:4, cartesian:2,3){did_you_mean(kind, names)}"
        )
    return TreeFile.read(spec).tree
