"""`python -m medusa_jax compile`: a decode step or a training step by a device's own compiler.

TPUs and GPUs need not be here: their compilers run anywhere. A model of shapes only is compiled, and
the compiler's estimates are added up by stage. Nothing is run.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from medusa_jax.commands.flags import Program, at_least, flag, numbers
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.interop.shapes import SHAPES, find_shape

if TYPE_CHECKING:
    from medusa_jax.evaluate.compiled.targets import Target

EXAMPLES = """examples:
  python -m medusa_jax compile --for v5e
  python -m medusa_jax compile --for v6e:2x2 --drafter eagle --acceptance sampled --top_p 0.9
  python -m medusa_jax compile --for h100 --shape llama3-8b --drafter medusa --json
  python -m medusa_jax compile --for v5e --shape llama3.1-8b --drafter configs/llama31_8b.py
  python -m medusa_jax compile --for v5e:2x4 --train configs/vicuna7b_m1.py
  python -m medusa_jax compile --for here --shape path/to/model
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Memory, kernels or cycles by stage, and defects of a decode step, by a device's compiler."""

    target: str = flag(
        "v4, v5e, v5p or v6e, with a topology such as v5e:2x4; h100; or here: the default device",
        name="--for",
        metavar="DEVICES",
    )
    shape: str = flag(f"{', '.join(SHAPES)}, or a config.json or its directory", "llama-7b")
    drafter: str = flag(
        "medusa, hydra, hydrapp, amphista, amphista_alpha, eagle, eagle3, or none; or a recipe, for its heads",
        "medusa",
    )
    tree: int = flag("nodes, root included", 64, type=at_least(1))
    batch: int = flag("rows", 1, type=at_least(1))
    context: int = flag("tokens of each row", 900, type=at_least(1))
    mesh: tuple[int, int, int] | None = flag(
        "data,fsdp,tensor (default: 1,1,1; of a recipe: its own)", None, type=numbers()
    )
    acceptance: str = flag("greedy, sampled, rejection or typical", "greedy")
    top_p: float = flag(
        "below 1: the filter runs (its cost does not depend on the value)", 1.0
    )
    layers: int | None = flag(
        "layers to compile; figures are for all layers of the shape (default: 8; here or of a recipe all)",
        None, type=at_least(2),
    )  # fmt: skip
    train: str | None = flag(
        "instead: the training step of a recipe", None, metavar="CONFIG"
    )
    json: bool = flag("print one JSON object", False)


def run(flags: Flags) -> int:
    """Compile, then print."""
    import jax

    from medusa_jax.evaluate.compiled.targets import HERE, find_target

    if flags.target != HERE:
        jax.config.update("jax_platforms", "cpu")  # the TPU plugin would look for a TPU
    target = find_target(flags.target)
    text = training_step(flags, target) if flags.train else decode_step(flags, target)
    if flags.json:
        print(text)
    else:
        print(
            f"{text}\n\nestimates of {target.compiler}, jax {jax.__version__}; nothing was run"
        )
    return 0


def decode_step(flags: Flags, target: "Target") -> str:
    """The report of a decode step."""
    import jax

    from medusa_jax.api import DEMO
    from medusa_jax.commands.train import load_config
    from medusa_jax.decoding.acceptance import RULES
    from medusa_jax.evaluate.compiled import report
    from medusa_jax.evaluate.compiled.programs import Case
    from medusa_jax.evaluate.compiled.targets import HERE
    from medusa_jax.heads.registry import drafter_class, make_drafter
    from medusa_jax.model.llama import decoding_config
    from medusa_jax.model.placing import choose_storage
    from medusa_jax.sharding import make_mesh
    from medusa_jax.tree.files import load_tree_file, tree_of_size
    from medusa_jax.tree.tree import Tree

    if flags.acceptance not in RULES:
        raise UserError(
            f"--acceptance is one of {', '.join(RULES)}, not {flags.acceptance!r}"
        )
    config = find_shape(flags.shape)
    case = Case(
        config, target, flags.batch, flags.context, flags.mesh or (1, 1, 1),
        flags.acceptance, ("top_p",) if flags.top_p < 1 else (), layers=flags.layers or 8,
    )  # fmt: skip
    if target.name == HERE:  # the program that decoding would run
        dtype = jax.numpy.dtype("float32" if target.platform == "cpu" else "bfloat16")
        mesh = make_mesh(case.mesh, target.devices)
        case = dataclasses.replace(
            case, dtype=dtype, storage=choose_storage(dtype, mesh),
            layers=flags.layers or config.n_layers,
        )  # fmt: skip
    plain = flags.drafter == "none"
    if flags.drafter.endswith(".py"):
        heads = load_config(flags.drafter).heads
    else:
        kind = drafter_class("medusa" if plain else flags.drafter)
        if not kind.trained:
            raise UserError(f"--drafter {flags.drafter} has no heads to compile")
        heads = kind.Config(drafter=kind.name, n_heads=4)
    # The growth order of the demo's Hydra heads: as deep as the papers' trees, four levels.
    calibrated = load_tree_file(DEMO / "hydra" / "tree.json")
    tree = Tree.none() if plain else tree_of_size(calibrated, flags.tree)
    # The drafter is made for the compiled layers: EAGLE-3 reads inside the backbone.
    few = dataclasses.replace(config, n_layers=case.compiled_layers)
    drafter = make_drafter(heads, decoding_config(few))
    with compiling_for(target):
        steps = report.measure(case, drafter, tree)
    if flags.json:
        return json.dumps(report.as_json(case, *steps))
    return (
        f"## {flags.shape}, {flags.drafter}, {tree.n_nodes} nodes, batch {flags.batch}, "
        f"{flags.context} tokens, {flags.acceptance}, {target.title}\n\n"
        + report.as_text(case, *steps)
    )


def training_step(flags: Flags, target: "Target") -> str:
    """The report of a recipe's training step."""
    from medusa_jax.commands.train import load_config
    from medusa_jax.evaluate.compiled.programs import compile_training
    from medusa_jax.evaluate.compiled.report import training_text

    assert flags.train is not None
    cfg = load_config(flags.train)
    with compiling_for(target):
        found = compile_training(cfg, target, flags.mesh or cfg.mesh, flags.layers or 0)
    if flags.json:
        return json.dumps(found)
    return f"## {flags.train}, {target.title}\n\n{training_text(target, found)}"


@contextlib.contextmanager
def compiling_for(target: "Target") -> Iterator[None]:
    """Announce a slow compilation; report a failing compiler in one line."""
    import jax

    with announced(f"compiling for {target.name}"):
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"{target.compiler} cannot compile for {target.name}: {first}"
            ) from error


main = Program("python -m medusa_jax compile", Flags, run, EXAMPLES)
