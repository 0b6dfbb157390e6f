"""`generate` as a function: what the first example of the documentation calls."""

from collections.abc import Sequence

from medusa_jax.api.model import Model
from medusa_jax.api.results import DEFAULTS, Options, Result
from medusa_jax.tree.tree import Tree


def generate(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    options: Options | Sequence[Options] = DEFAULTS,
    *,
    tree: str | Tree | None = None,
    acceptance: str = "auto",
) -> list[Result]:
    """Decode a batch of prompts with draft heads, each to its end.

    Args:
      model: what `load` gave.
      prompts: texts or lists of token ids; rows may differ in length.
      options: one for all, or one per prompt.
      tree: the draft tree, or its name as for `--tree`; "none" is plain decoding, and by
        default it is the model's choice for this number of prompts (`Model.tree_at`).
      acceptance: "auto", "greedy", "sampled", "rejection" or "typical"; "auto" is lossless.

    Returns: one result per prompt, in order.

    Raises:
      UserError: as `Model.generate`.
    """
    return model.generate(prompts, options, tree=tree, acceptance=acceptance)
