"""The size of tree that pays most on this device for so many rows: what `--tree auto` means.

A tree file says in which order nodes are worth adding and how many tokens a step gives with each
size; both belong to the heads. What a step costs belongs to the machine and to the number of rows, so
it is measured there: at first use, in rounds of all sizes that may pay (`api/rounds.py`), and kept in
the user's cache directory. A choice that noise could have turned is measured again at the next starts,
together with the rounds there are. Plain decoding is one of the sizes: where no tree pays, none is
used. The choices for several numbers of rows are a ladder (`tree/ladder.py`); `calibrate` measures
one and writes it into the tree file too.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
from jax.sharding import Mesh

from medusa_jax.api.model import Model
from medusa_jax.api.rounds import Race, Round
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.console import announced
from medusa_jax.decoding.timing import StepClock
from medusa_jax.errors import UserError
from medusa_jax.measured import Kept
from medusa_jax.model.stored import Storage
from medusa_jax.tree import Ladder, file_ladder, tree_of_size
from medusa_jax.tree.files import ACCELERATOR_NODES

# "bundled": the file's own choice is taken and nothing is measured.
VARIABLE = "MEDUSA_JAX_TREES"
# Most steps in one go, seconds of plain decoding that do for one, tokens of the text that they are
# timed behind.
STEPS, ENOUGH, PROMPT = 16, 0.01, 16
# A choice is not measured again once it was measured at so many starts, sure or not.
STARTS = 4
# Numbers of rows that have a rung.
ROWS = (1, 2, 4, 8, 16)


def tokens_by_size(calibrated: dict[str, Any] | None, platform: str) -> dict[int, float]:
    """Tokens per step by number of nodes, smallest first, as the tree file's evidence has them.

    On an accelerator, whose steps hardly tell 64 nodes from one, a size that the evidence does not
    reach counts with the tokens of the largest one that it does.
    """
    ladder = ((calibrated or {}).get("evidence") or {}).get("ladder") or []
    growth = len((calibrated or {}).get("growth", ()))
    found = {row["nodes"]: row["tokens_per_step"] for row in ladder}
    found = {size: n for size, n in sorted(found.items()) if size <= growth + 1}
    if found and platform != "cpu" and max(found) < ACCELERATOR_NODES <= growth + 1:
        found[ACCELERATOR_NODES] = found[max(found)]
    return found and {1: 1.0} | found


def is_measured(calibrated: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Whether "auto" is to be measured: the tree file says what each size gives, and nobody said no.

    Several processes would measure several choices, and run programs that do not go together.

    Raises:
      UserError: the variable says something else than "bundled".
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "bundled"):
        raise UserError(f"{VARIABLE} is bundled or not set, not {asked!r}")
    if asked == "bundled" or jax.process_count() > 1:
        return False
    return bool(tokens_by_size(calibrated, jax.default_backend()))


def kept_choice(
    calibrated: dict[str, Any],
    batch: int,
    config: LlamaConfig,
    heads: HeadsConfig,
    dtype: Any,
    storage: Storage,
    mesh: Mesh,
) -> Kept:
    """Where the choice for this device, model and batch size is kept."""
    tree = (calibrated["growth"], calibrated["evidence"]["ladder"], STEPS, ENOUGH, PROMPT)
    sizes = tuple(mesh.shape.values())
    forms = (storage, storage.of_drafts)
    return Kept("trees", *tree, batch, config, heads, str(dtype), forms, sizes)


def kept_size(kept: Kept) -> int | None:
    """The size that was measured to pay most, if it was."""
    size = kept.read().get("nodes")
    return size if type(size) is int else None


def is_settled(kept: Kept) -> bool:
    """Whether the choice holds: no other may be much faster, as far as its rounds say, or it was
    measured often enough."""
    note = kept.read()
    return bool(note.get("sure")) or note.get("starts", 0) >= STARTS


def choose_on_device(
    model: Model, calibrated: dict[str, Any], batch: int, kept: Kept, afresh: bool = False
) -> dict[str, Any]:
    """`measure_rung`, and the choice and its rounds are kept.

    Args:
      afresh: what was measured before is forgotten.
    """
    before = {} if afresh else kept.read()
    earlier = [
        {int(n): seconds for n, seconds in one.items()} for one in before.get("rounds", ())
    ]
    again = ", again: it was busy before" if earlier else ""
    with announced(f"measuring which tree pays on this device{again}"):
        found, rounds = measure_rung(model, calibrated, batch, earlier=earlier)
    kept.write(found | {"starts": before.get("starts", 0) + 1, "rounds": rounds})
    return found


def measure_rung(
    model: Model,
    calibrated: dict[str, Any],
    batch: int,
    most_nodes: int | None = None,
    earlier: Sequence[Round] = (),
) -> tuple[dict[str, Any], list[Round]]:
    """Measure steps of growing trees with so many rows (`rounds.Race`), and choose.

    Args:
      most_nodes: larger trees are not tried.
      earlier: rounds of earlier starts, which count as well.

    Returns: `nodes`, the choice, `batch`, `rows`, which are `rounds.row` of each size that was tried,
      and `sure`; and all rounds.
    """
    found = tokens_by_size(calibrated, jax.default_backend())
    trees = {size: tree_of_size(calibrated["growth"], size) for size in found if size > 1}
    engines = {1: model.engine(tree="none")} | {
        size: model.engine(tree)
        for size, tree in trees.items()
        if size <= (most_nodes or size) and tree.drafted.depth <= model.drafter.n_heads
    }
    prompt = [min(1, model.config.vocab_size - 1)] * PROMPT
    clock = StepClock(
        list(engines.values()), model.variables, prompt, batch=batch, n_steps=STEPS
    )
    clock.shorten(engines[1], ENOUGH)
    compiled = {1}

    def seconds(size: int) -> float:
        if size not in compiled:
            clock.seconds(engines[size])
            compiled.add(size)
        return clock.n_steps * clock.seconds(engines[size])

    race = Race(seconds, {size: found[size] for size in engines if size > 1}, earlier)
    race.run()
    return race.choice() | {"batch": batch}, race.rounds


def known_ladder(calibrated: dict[str, Any], *marks: Any) -> Ladder | None:
    """What is known without measuring: choices kept on this device, else the tree file's own.

    Args:
      marks: what else `kept_choice` takes, behind the number of rows.
    """
    ladder = file_ladder(calibrated, jax.default_backend())
    for rows in ROWS:
        size = kept_size(kept_choice(calibrated, rows, *marks))
        if size is not None:
            ladder = (ladder or Ladder({})).having(
                rows, tree_of_size(calibrated["growth"], size)
            )
    return ladder


def kept_for(model: Model, calibrated: dict[str, Any], rows: int) -> Kept:
    """`kept_choice` of a loaded model."""
    heads = model.drafter.heads
    marks = (model.config, heads, model.dtype, model.storage, model.mesh)
    return kept_choice(calibrated, rows, *marks)


def measured_ladder(
    model: Model, calibrated: dict[str, Any], sizes: Sequence[int]
) -> Ladder:
    """A rung for each number of rows, measured on this device at first use.

    Of the choices that noise could have turned one is measured again at a start, or somebody with a
    busy machine would wait for all of them every time.
    """
    rungs, looked_again = {}, False
    for rows in sizes:
        kept = kept_for(model, calibrated, rows)
        size = kept_size(kept)
        again = size is not None and not is_settled(kept) and not looked_again
        if size is None or again:
            size = choose_on_device(model, calibrated, rows, kept)["nodes"]
        looked_again |= again
        rungs[rows] = tree_of_size(calibrated["growth"], size)
    return Ladder(rungs)
