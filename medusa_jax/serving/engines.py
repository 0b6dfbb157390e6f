"""The engine of each group of rows, and the room that the trees of their steps need."""

from collections.abc import Mapping
from dataclasses import replace

from medusa_jax.api import Model
from medusa_jax.api.tree_choice import text_is_free
from medusa_jax.decoding import constrained
from medusa_jax.decoding.state import Engine
from medusa_jax.heads.registry import no_drafter
from medusa_jax.serving.job import Group
from medusa_jax.serving.ladder import ladder_sizes
from medusa_jax.serving.request import MOST_BEST
from medusa_jax.tree.tree import Tree, chain_as_deep


class Engines:
    """The engines of one model.

    Attributes:
      trees: the tree for each number of rows.
      common: the engine of programs that all groups share.
      with_logprobs: the same with log-probabilities.
      sizes: the trees that the ladder chooses among.
      widest: the most tokens that a step writes to a row's cache; so many slots must be free.
      longest: most tokens that a step without constraints appends.
    """

    def __init__(self, model: Model, trees: Mapping[int, Tree]) -> None:
        self.model, self.trees = model, dict(trees)
        self.sizes = ladder_sizes(model, list(trees.values()))
        all_trees = [*trees.values(), *self.sizes]
        deepest = max(all_trees, key=lambda tree: tree.drafted.depth)
        engine = model.engine(deepest, "sampled", sampled=True)
        # All programs but the step depend on the tree's depth alone (`Engine.depth_only`), so all trees share those of
        # the deepest. It has copies, so that all states have the text.
        copies = Tree.copies(deepest.depth)
        self.longest = chain_as_deep([*all_trees, copies]).path_length
        chain = Tree.copies(constrained.MANY)
        self.common = replace(engine, tree=chain_as_deep([*all_trees, copies, chain]))
        n = min(MOST_BEST, engine.llama.config.vocab_size)
        self.with_logprobs = replace(self.common, logprobs=n)
        depth = self.longest - 1
        self._copying = {n: tree.with_copies(depth) for n, tree in trees.items()}
        sizes = [tree.n_nodes for tree in (*all_trees, *self._copying.values())]
        # Of rows with constraints.
        sizes += [tree.drafted.n_nodes + constrained.MANY for tree in trees.values()]
        self.widest = max(sizes)

    def of_prompts(self, group: Group) -> Engine:
        """Return the engine that reads a group's prompts, with log-probabilities for all."""
        return replace(self._of(group), logprobs=self.with_logprobs.logprobs)

    def of_steps(self, group: Group, n_rows: int, nodes: int | None = None) -> Engine:
        """Return the engine of a group's steps, with the tree of these nodes; by default that for the number of rows."""
        engine = self._of(group)
        if not group.drafts:
            drafter = no_drafter(engine.llama.config)
            return replace(engine, tree=Tree.none(), drafter=drafter)
        trees = self._copying if group.predicted else self.trees
        sizes = {tree.n_nodes: tree for tree in self.sizes}
        engine = replace(engine, tree=sizes[nodes] if nodes else trees[n_rows])
        if group.constrained:
            engine = constrained.with_runs(engine, not self.model.trees.chooses)
        return engine

    def text_is_free(self, group: Group) -> bool:
        """Whether a group's texts cannot depend on the trees of their steps."""
        is_free = text_is_free(self._of(group), self.model.dtype)
        return is_free and not (group.predicted or group.constrained)

    def _of(self, group: Group) -> Engine:
        engine = self.with_logprobs if group.logprobs else self.common
        if group.constrained:  # as `Sampling.barred_B`
            engine = replace(engine, no_repeat_ngram_size=0)
        # Greedy at temperature 0.
        rule = "sampled" if group.rule == "auto" else group.rule
        return replace(engine, acceptance=rule)
