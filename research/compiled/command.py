"""`python -m research compile`: memory, traffic, cycles and inefficiencies of a step, by a device's compiler.

TPUs and GPUs need not be here: their compilers run anywhere. A model of shapes only is compiled;
nothing is run. Extrapolated from 8 layers, figures are within 2% of all layers compiled; from 2, within 7%.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator

import jax

from medusa_jax.api import DEMO
from medusa_jax.commands.flags import CommandLine, at_least, flag, numbers
from medusa_jax.commands.train import load_recipe
from medusa_jax.console import announced
from medusa_jax.decoding.acceptance import RULES
from medusa_jax.errors import UserError, one_of
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.convert import choose_storage
from medusa_jax.model.llama import decoding_config
from medusa_jax.sharding import make_mesh
from medusa_jax.tree.files import TreeFile
from medusa_jax.tree.tree import Tree
from research.compiled import report
from research.compiled.programs import Case, compile_training
from research.compiled.readers import read_program
from research.compiled.targets import HERE, Target, find_target
from research.compiled.warnings import step_warnings
from research.shapes import SHAPES, find_shape

EXAMPLES = """examples:
  python -m research compile --for v5e
  python -m research compile --for v6e:2x2 --mesh 1,1,4 --shape llama3-8b --batch 16 --context 8000
  python -m research compile --for h100 --shape llama3-8b --drafter eagle --json
  python -m research compile --for v6e:2x2 --drafter eagle --acceptance sampled --top_p 0.9
  python -m research compile --for v5e --shape llama3.1-8b --drafter configs/llama31_8b.py
  python -m research compile --for v5e:2x4 --train configs/vicuna7b_m1.py
  python -m research compile --for here --shape path/to/model
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Memory, traffic, kernels or cycles by stage, and inefficiencies of a step, by the device's compiler."""

    target: str = flag(
        "v4, v5e, v5p or v6e, with a topology such as v5e:2x4; h100; or here: the default device",
        name="--for",
        metavar="DEVICES",
    )
    shape: str = flag(f"{', '.join(SHAPES)}, or a config.json or its directory", "llama-7b")
    drafter: str = flag(
        f"{', '.join(DRAFTERS)}, or none; or a recipe, for its heads", "medusa"
    )
    tree: int = flag("nodes, root included", 64, type=at_least(1, most=4096))
    batch: int = flag("rows", 1, type=at_least(1, most=4096))
    context: int = flag("tokens of each row", 900, type=at_least(1, most=2**20))
    mesh: tuple[int, int, int] | None = flag(
        "data,fsdp,tensor (default: 1,1,1; of a recipe: its own)", None, type=numbers()
    )
    acceptance: str = flag("greedy, sampled, rejection or typical", "greedy")
    top_p: float = flag(
        "below 1: the filter runs (its cost does not depend on the value)", 1.0
    )
    layers: int | None = flag(
        "layers of a decode step to compile; figures are for all (default: 8; here all)",
        None, type=at_least(2),
    )  # fmt: skip
    train: str | None = flag(
        "instead: the training step of a recipe", None, metavar="CONFIG"
    )
    json: bool = flag("print one JSON object", False)


def run(flags: Flags) -> int:
    if flags.target != HERE:
        jax.config.update("jax_platforms", "cpu")  # the TPU plugin would look for a TPU
    target = find_target(flags.target)
    if flags.train:
        title = f"{flags.train}, {target.title}"
        facts, text = training_report(flags.train, flags.mesh, target)
    else:
        title = (
            f"{flags.shape}, {flags.drafter}, {flags.tree} nodes, batch {flags.batch}, "
            f"{flags.context} tokens, {flags.acceptance}, {target.title}"
        )
        facts, text = decoding_report(flags, target)
    if flags.json:
        print(json.dumps(facts))
        return 0
    source = f"estimates of {target.compiler}, jax {jax.__version__}; nothing was run"
    print(f"## {title}\n\n{text}\n\n{source}")
    return 0


def decoding_report(flags: Flags, target: Target) -> report.Report:
    """Figures of the decode loop, next to those of plain decoding."""
    case, drafter, tree = case_of(flags, target)
    filters = ("top_p",) if flags.top_p < 1 else ()
    with compiling_for(target):
        plain, drafted = report.measure(case, drafter, tree, filters)
    return report.Report(
        report.as_json(case, plain, drafted), report.as_text(case, plain, drafted)
    )


def training_report(
    path: str, mesh: tuple[int, int, int] | None, target: Target
) -> report.Report:
    """Figures of a recipe's training step."""
    cfg = load_recipe(path).get_config()
    with compiling_for(target):
        program, facts = compile_training(cfg, target, mesh or cfg.mesh)
    lines = read_program(program.as_text() or "")
    facts["warnings"] = step_warnings(lines, cfg.train.dtype, target.platform)
    return report.Report(facts, report.memory_lines(facts, target.chip.memory))


def case_of(flags: Flags, target: Target) -> tuple[Case, Drafter, Tree]:
    """The decode loop that the flags describe."""
    one_of("--acceptance", flags.acceptance, RULES)
    config = find_shape(flags.shape)
    case = Case(
        config, target, flags.batch, flags.context, flags.mesh or (1, 1, 1),
        flags.acceptance, layers=flags.layers or 8,
    )  # fmt: skip
    if target.name == HERE:  # the program that decoding would run
        dtype = jax.numpy.dtype("float32" if target.platform == "cpu" else "bfloat16")
        mesh = make_mesh(case.mesh, target.devices)
        kernels = choose_kernels(mesh, dtype, config.head_dim)
        storage = choose_storage(kernels, dtype, mesh)
        layers = flags.layers or config.n_layers
        case = dataclasses.replace(case, dtype=dtype, storage=storage, layers=layers)
    is_plain = flags.drafter == "none"
    if flags.drafter.endswith(".py"):
        heads = load_recipe(flags.drafter).get_config().heads
    else:
        name = "medusa" if is_plain else flags.drafter
        kind = drafter_class(name)
        if not kind.trained:
            raise UserError(f"--drafter {flags.drafter} has no heads to compile")
        heads = kind.Config(drafter=name, n_heads=4)
    # The growth order of the demo's Hydra heads: as deep as the papers' trees, four levels.
    file = TreeFile.read(DEMO / "hydra" / "tree.json")
    tree = Tree.none() if is_plain else file.of_size(flags.tree)
    # The drafter is made for the compiled layers: EAGLE-3 reads inside the backbone.
    compiled_config = dataclasses.replace(config, n_layers=case.compiled_layers)
    return case, make_drafter(heads, decoding_config(compiled_config)), tree


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Announce a slow compilation; report a failing compiler in one line."""
    with announced(f"compiling for {target.name}"):
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"{target.compiler} cannot compile for {target.name}: {first}"
            ) from error


main = CommandLine("python -m research compile", Flags, run, EXAMPLES)
