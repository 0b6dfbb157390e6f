"""What `bench` compares: plain decoding, and drafters with their trees, all on one backbone."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_jax.commands.model_flags import BaseFlags, load_model
from medusa_jax.notation import entries
from medusa_jax.tree.tree import Tree

if TYPE_CHECKING:
    from medusa_jax.api import Model, Options
    from medusa_jax.evaluate.race import Contender


@dataclass(frozen=True)
class Entrant:
    """A drafter in the race.

    Attributes:
      name: as given.
      model: the backbone with this drafter; all entrants share one backbone.
      trees: --tree value -> tree; for auto None: the model chooses in every step, as in `decode`.
      mark: suffix of the label that distinguishes heads of one family.
    """

    name: str
    model: "Model"
    trees: dict[str, Tree | None]
    mark: str = ""

    def label(self, spec: str) -> str:
        """The drafter's name and, unless it is automatic or a number of nodes, the --tree value."""
        tree = self.trees[spec] or self.model.tree
        name = self.model.drafts_by(tree) + self.mark if tree.depth else self.name
        return name if spec == "auto" or spec.isdecimal() else f"{name}, {spec}"


def tree_specs(text: str) -> list[str]:
    """ "auto,cartesian:2x3" -> ["auto", "cartesian:2,3"]."""
    specs = entries(text) or ["auto"]
    return [spec.replace("x", ",") if ":" in spec else spec for spec in specs]


def default_names(model: str | None) -> list[str]:
    """All heads that come with the model, and the drafters that need none."""
    from medusa_jax.api.bundles import bundled_draft_model, bundled_heads

    draft_model = ["draft_model"] if bundled_draft_model(model) else []
    return [*bundled_heads(model), *draft_model, "prompt_lookup@auto"]


def load_entrants(flags: BaseFlags, names: Sequence[str], trees: str) -> Iterator[Entrant]:
    """Load the drafters on one copy of the backbone. --draft_weights is for those with heads.

    Args:
      trees: for names without @TREE.
    """
    from medusa_jax.heads.names import split_drafter
    from medusa_jax.heads.registry import is_baseline

    base: Model | None = None
    for entry in names:
        name, _, tree = (entry, "", "") if os.path.exists(entry) else entry.partition("@")
        specs = tree_specs(tree or trees)
        spec = "auto" if "auto" in specs else specs[0]
        headless = name == "none" or is_baseline(split_drafter(name)[0])
        own = replace(flags, draft_weights=None) if headless else flags
        model = load_model(own, name, tree=spec)
        base = base or model
        model.variables = model.variables | {"backbone": base.variables["backbone"]}
        by_spec = {s: None if s == "auto" else model.parse_tree(s) for s in specs}
        yield Entrant(name, model, by_spec)


def marked(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Mark heads of one family by the names of their directories, by their paths if these are equal."""
    families: dict[str, set[str]] = defaultdict(set)
    for e in entrants:
        if e.model.has_drafter:
            families[e.model.drafter.heads.drafter].add(e.name)
    found = []
    for e in entrants:
        names = families[e.model.drafter.heads.drafter]
        differ = len({Path(name).name for name in names}) == len(names)
        mark = f" ({Path(e.name).name if differ else e.name})" if len(names) > 1 else ""
        found.append(replace(e, mark=mark))
    return found


def contenders_of(
    entrants: Sequence[Entrant], options: "Options", batches: Sequence[int] = (0,)
) -> "list[Contender]":
    """Plain decoding, and every entrant with each of its trees, for each batch size; 0: a prompt at a time."""
    from medusa_jax.evaluate.race import ourselves

    contenders: list[Contender] = []
    for batch in batches:
        contender = partial(
            ourselves, options=options, batch=batch, against=len(contenders)
        )
        contenders.append(contender(entrants[0].model, Tree.none()))
        for e in entrants:
            for spec, tree in e.trees.items():
                contenders.append(contender(e.model, tree, label=e.label(spec)))
    return contenders
