"""`python -m medusa_jax compile`: memory and traffic of a decode or a training step, by a device's compiler.

TPUs and GPUs need not be here: their compilers run anywhere. A model of shapes only is compiled;
nothing is run. `python -m research compile` adds estimated cycles, kernels and known inefficiencies.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from medusa_jax.commands.flags import Program, at_least, flag, numbers
from medusa_jax.console import announced, byte_size
from medusa_jax.errors import UserError
from medusa_jax.files.shapes import SHAPES, find_shape
from medusa_jax.heads.names import DRAFTERS

if TYPE_CHECKING:
    from medusa_jax.evaluate.compiled import Case
    from medusa_jax.evaluate.targets import Target
    from medusa_jax.heads.drafter import Drafter
    from medusa_jax.tree.tree import Tree

EXAMPLES = """examples:
  python -m medusa_jax compile --for v5e
  python -m medusa_jax compile --for v6e:2x2 --mesh 1,1,4 --shape llama3-8b --batch 16 --context 8000
  python -m medusa_jax compile --for h100 --shape llama3-8b --drafter eagle --json
  python -m medusa_jax compile --for v5e --shape llama3.1-8b --drafter configs/llama31_8b.py
  python -m medusa_jax compile --for v5e:2x4 --train configs/vicuna7b_m1.py
  python -m medusa_jax compile --for here --shape path/to/model
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Memory and traffic of each device in a decode step, by the device's compiler."""

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
    layers: int | None = flag(
        "layers of a decode step to compile; figures are for all (default: 8; here all)",
        None, type=at_least(2),
    )  # fmt: skip
    train: str | None = flag(
        "instead: the training step of a recipe", None, metavar="CONFIG"
    )
    json: bool = flag("print one JSON object", False)


def run(flags: Flags) -> int:
    """Compile, then print."""
    target = target_of(flags)
    found = (train_step if flags.train else decode_step)(flags, target)
    if flags.json:
        print(json.dumps(found))
        return 0
    print(
        f"## {title_of(flags, target)}\n\n{as_text(found, target)}\n\n{source_of(target)}"
    )
    return 0


def target_of(flags: Flags) -> "Target":
    """The devices of --for."""
    import jax

    from medusa_jax.evaluate.targets import HERE, find_target

    if flags.target != HERE:
        jax.config.update("jax_platforms", "cpu")  # the TPU plugin would look for a TPU
    return find_target(flags.target)


def decode_step(flags: Flags, target: "Target") -> dict[str, Any]:
    """Figures of the decode loop, the object that `--json` prints."""
    from medusa_jax.evaluate.compiled import compile_step

    case, drafter, tree = case_of(flags, target)
    with compiling_for(target):
        step = compile_step(case, drafter, tree)
    return {
        "target": target.name,
        "device": target.chip.title,
        "estimated": True,
        "layers": case.compiled_layers,
        "memory_bytes": step.memory,
        "weight_bytes": step.weights,
        "sent_bytes": step.sent,
    }


def train_step(flags: Flags, target: "Target") -> dict[str, Any]:
    """Figures of a recipe's training step, the object that `--json` prints."""
    from medusa_jax.commands.train import load_config
    from medusa_jax.evaluate.compiled import compile_training

    assert flags.train is not None
    cfg = load_config(flags.train)
    with compiling_for(target):
        return compile_training(cfg, target, flags.mesh or cfg.mesh)[1]


def case_of(flags: Flags, target: "Target") -> "tuple[Case, Drafter, Tree]":
    """The decode loop that the flags describe."""
    import jax

    from medusa_jax.api import DEMO
    from medusa_jax.commands.train import load_config
    from medusa_jax.decoding.acceptance import RULES
    from medusa_jax.evaluate.compiled import Case
    from medusa_jax.evaluate.targets import HERE
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
        flags.acceptance, layers=flags.layers or 8,
    )  # fmt: skip
    if target.name == HERE:  # the program that decoding would run
        dtype = jax.numpy.dtype("float32" if target.platform == "cpu" else "bfloat16")
        storage = choose_storage(dtype, make_mesh(case.mesh, target.devices))
        layers = flags.layers or config.n_layers
        case = dataclasses.replace(case, dtype=dtype, storage=storage, layers=layers)
    plain = flags.drafter == "none"
    if flags.drafter.endswith(".py"):
        heads = load_config(flags.drafter).heads
    else:
        kind = drafter_class("medusa" if plain else flags.drafter)
        if not kind.trained:
            raise UserError(f"--drafter {flags.drafter} has no heads to compile")
        heads = kind.Config(drafter="medusa" if plain else flags.drafter, n_heads=4)
    # The growth order of the demo's Hydra heads: as deep as the papers' trees, four levels.
    calibrated = load_tree_file(DEMO / "hydra" / "tree.json")
    tree = Tree.none() if plain else tree_of_size(calibrated, flags.tree)
    # The drafter is made for the compiled layers: EAGLE-3 reads inside the backbone.
    few = dataclasses.replace(config, n_layers=case.compiled_layers)
    return case, make_drafter(heads, decoding_config(few)), tree


def title_of(flags: Flags, target: "Target") -> str:
    """The heading of a report."""
    if flags.train:
        return f"{flags.train}, {target.title}"
    return (
        f"{flags.shape}, {flags.drafter}, {flags.tree} nodes, batch {flags.batch}, "
        f"{flags.context} tokens, {flags.acceptance}, {target.title}"
    )


def source_of(target: "Target") -> str:
    """The last line of a report."""
    import jax

    return f"estimates of {target.compiler}, jax {jax.__version__}; nothing was run"


def as_text(found: Mapping[str, Any], target: "Target") -> str:
    """The figures without `--json`."""
    memory = byte_size(found["memory_bytes"])
    if room := target.chip.memory:
        fits = "" if found["memory_bytes"] <= room else ": does NOT fit"
        memory += f" of {room / 1e9:.0f} GB{fits}"
    lines = {"memory per device": memory}
    if "weight_bytes" in found:
        lines["weights of a step"] = byte_size(found["weight_bytes"])
    if "stored_bytes" in found:
        lines["stored"] = byte_size(found["stored_bytes"])
    sent = [f"{kind} {byte_size(n)}" for kind, n in found["sent_bytes"].items()]
    lines["sent a step"] = ", ".join(sent) or "nothing"
    lines["layers compiled"] = str(found["layers"])
    return "\n".join(f"{name:18} {figure}" for name, figure in lines.items())


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
