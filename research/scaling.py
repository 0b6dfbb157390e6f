"""`python -m research scaling`: memory, traffic and time of recipes and decoding on 1, 8 and 64 devices.

Programs are compiled for that many simulated CPU devices. Layers are identical, so memory, traffic and
arithmetic are affine in their number: models of two and three layers are compiled, and L layers need
c(2) + (L - 2) (c(3) - c(2)). --all_layers compiles all layers instead, to check this extrapolation.
"""

import copy
import dataclasses
import json
from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from medusa_jax.commands.flags import Program, flag
from medusa_jax.commands.train import load_config
from medusa_jax.config import Config, HeadsConfig, LlamaConfig
from medusa_jax.console import announced
from medusa_jax.decoding.state import DecodeState
from medusa_jax.devices.chips import Chip, find_chip
from medusa_jax.devices.platforms import simulate_devices
from medusa_jax.evaluate.compiled import compiled_loop
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.files.shapes import SHAPES
from medusa_jax.heads.registry import make_drafter
from medusa_jax.hlo.collectives import collectives, sent_by_kind
from medusa_jax.model.llama import decoding_config
from medusa_jax.sharding import Params, bytes_on_device, make_mesh
from medusa_jax.training import dry
from medusa_jax.whole_files import Json
from research import planning
from research.counted import (
    CPU_ONLY,
    F32,
    narrow_elements,
    shard_of,
    total_bytes,
    training_bytes,
)
from research.draft_cost import paper_tree
from research.layers import extrapolated

DEVICES = [1, 8, 64]
# Layers of the compiled models.
FEW = (2, 3)
# (name, recipe, shape if not the recipe's).
TRAINING = (
    ("Medusa-1, Vicuna-7B", "vicuna7b_m1", None),
    ("Medusa-2, Vicuna-7B (QLoRA)", "vicuna7b_m2", None),
    ("Medusa-1, Vicuna-13B", "vicuna13b_m1", None),
    ("Medusa-2, Vicuna-13B (QLoRA)", "vicuna13b_m2", None),
    ("Medusa-2, Vicuna-33B (LoRA, KL)", "vicuna33b", None),
    ("Medusa-1, Llama-3.1-8B", "llama31_8b", None),
    ("Medusa-2, Llama-3.1-8B (QLoRA)", "vicuna13b_m2", "llama3.1-8b"),
    ("Medusa-1, Llama-3.1-70B", "llama31_8b", "llama3.1-70b"),
    ("Medusa-2, Llama-3.1-70B (QLoRA)", "vicuna13b_m2", "llama3.1-70b"),
)
DECODING = ("llama-7b", "llama-13b", "llama-33b", "llama3.1-8b", "llama3.1-70b")
# Two epochs of 60,000 rows of 2048 tokens, at most the papers' samples.
SAMPLES, EPOCHS = 60_000, 2
EXAMPLES = """examples:
  python -m research scaling > scaling_table.md
  python -m research scaling --devices 8 --only 33B
  python -m research scaling --devices 8 --only "Medusa-1, Vicuna-7B" --all_layers
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Memory, traffic and time of recipes and decoding on many devices."""

    devices: list[int] = flag(  # noqa: RUF009
        "numbers of devices", DEVICES, action="store", type=int, nargs="+"
    )
    only: str = flag("only rows whose name contains this", "")
    all_layers: bool = flag("compile all layers, not two and three", False)
    chip: str = flag("chip whose peaks predict times", "a100-sxm")
    configs: str = flag("directory of the recipes", "configs")
    json: bool = flag("print a JSON object for each row at once", False)


def training(cfg: Config, devices: int, all_layers: bool = False) -> Json:
    """Dry run of a recipe on a mesh (1, devices, 1), with `counted`, bytes summed up by hand."""

    def of(n_layers: int) -> tuple[Config, dry.Shapes]:
        few = copy.deepcopy(cfg)
        few.model.arch = dataclasses.replace(cfg.model.arch, n_layers=n_layers)
        few.mesh, few.dry_run = (1, devices, 1), True
        return few, dry.step_shapes(few)

    n_layers = cfg.model.arch.n_layers
    few = None if all_layers else FEW
    report = extrapolated(lambda n: dry.measure(*of(n)), n_layers, few)
    whole, shapes = of(n_layers)
    tokens = shapes.batch["tokens"].size
    flops = tokens * planning.flops_per_token(whole, shapes.state.params)
    return report | {"counted": training_bytes(whole, shapes), "flops": flops}


def mesh_for(arch: LlamaConfig, devices: int) -> tuple[int, int, int]:
    """Mesh (data, 1, tensor): tensor is the largest of 8, 4, 2, 1 that divides heads and kernels."""
    sizes = (arch.n_heads, arch.n_kv_heads, arch.d_model, arch.d_ff, arch.vocab_size)
    tensor = max(
        n for n in (1, 2, 4, 8) if devices % n == 0 and not any(size % n for size in sizes)
    )
    return devices // tensor, 1, tensor


def decoding(
    arch: LlamaConfig, mesh_shape: Sequence[int], dtype: DTypeLike, all_layers: bool = False
) -> Json:
    """One step of Medusa with a tree of 64 nodes, a row per group of devices after 512 tokens.

    Returns: per device, bytes of arguments and in total, bytes sent per step, bytes of weights read;
      `counted`, its bytes summed up by hand.
    """
    mesh, tree = make_mesh(mesh_shape), paper_tree()
    drafter = make_drafter(HeadsConfig(n_heads=4), decoding_config(arch))

    def measure(n_layers: int) -> Json:
        config = dataclasses.replace(arch, n_layers=n_layers)
        program, variables, state = compiled_loop(
            config, drafter, tree, mesh, mesh_shape[0], 512, dtype
        )
        counted = decoding_bytes(variables, state, tree.n_nodes, config.vocab_size)
        del variables["backbone"]["embed_tokens"]  # looked up, not read
        return dry.memory_of(program) | {
            "weight_bytes": bytes_on_device(variables),
            "sent_bytes": sent_by_kind(collectives(program.as_text() or "")),
            "counted": counted,
        }

    return extrapolated(measure, arch.n_layers, None if all_layers else FEW)


def decoding_bytes(
    variables: Params, state: DecodeState, nodes: int, vocab_size: int
) -> dict[str, int]:
    """Bytes by purpose for decoding, from shapes with shardings: the check on the compiler's figure.

    Logits are in float32, each device has those of its columns of the LM head. On a CPU, products of
    16-bit kernels with several rows stay in 16 bits; before the loop XLA makes float32 copies of the
    embedding table and of kernels multiplied with a single row, those of the draft heads. An
    accelerator makes no copies.
    """
    cache = (state.cache, state.drafter)
    rows = shard_of(state.status_B).size
    copied = [
        variables["backbone"]["embed_tokens"],
        variables["heads"] if rows == 1 else {},
    ]
    sharding = state.status_B.sharding
    assert isinstance(sharding, NamedSharding)
    columns = vocab_size // sharding.mesh.shape["tensor"]
    return {
        "parameters": bytes_on_device(variables),
        "caches": bytes_on_device(cache),
        "other state": bytes_on_device(state) - bytes_on_device(cache),
        "logits": rows * nodes * columns * F32,
        CPU_ONLY: narrow_elements(copied) * F32,
    }


def training_row(name: str, report: Json, chip: Chip) -> Json:
    """Cells of the table: memory and traffic of a device, and times at the chip's peak.

    Both memory figures include what only a CPU needs.
    """
    p = planning.predict(report, chip)
    accumulation, rows, _ = report["batch"]
    updates = EPOCHS * SAMPLES / (accumulation * rows)
    return {
        "run": name,
        "devices": round(report["devices"]),
        "batch": f"{accumulation} x {rows}",
        "GB": round(report["total_bytes"] / 1e9, 1),
        "GB counted": round(total_bytes(report["counted"], "cpu") / 1e9, 1),
        "of a CPU only": round(report["counted"][CPU_ONLY] / 1e9, 1),
        "GB sent": round(sum(report["sent_bytes"].values()) / 1e9, 2),
        "compute s": float(f"{p.compute:.3g}"),
        "links s": float(f"{p.links:.3g}"),
        "hours": float(f"{updates * p.seconds / 3600:.3g}"),
        "sent": {kind: round(n / 1e9, 3) for kind, n in report["sent_bytes"].items()},
    }


def decoding_row(name: str, mesh: Sequence[int], found: Json, chip: Chip) -> Json:
    """The same of decoding."""
    read, sent = found["weight_bytes"], sum(found["sent_bytes"].values())
    return {
        "run": f"decode {name}",
        "devices": mesh[0] * mesh[1] * mesh[2],
        "mesh": ",".join(map(str, mesh)),
        "rows": mesh[0],
        "GB": round(found["total_bytes"] / 1e9, 1),
        "GB counted": round(total_bytes(found["counted"], "cpu") / 1e9, 1),
        "of a CPU only": round(found["counted"][CPU_ONLY] / 1e9, 1),
        "MB sent": round(sent / 1e6, 2),
        "read ms": float(f"{1e3 * read / chip.bandwidth:.3g}"),
        "links ms": float(f"{2e3 * sent / chip.link:.3g}"),
    }


def run(flags: Flags) -> int:
    """Compile, and print each row when it is ready (--json) or tables at the end."""
    simulate_devices(max(flags.devices))
    chip = find_chip(flags.chip)
    trained: list[Json] = []
    decoded: list[Json] = []

    def add(table: list[Json], row: Json) -> None:
        table.append(row)
        if flags.json:
            print(json.dumps(row), flush=True)

    for name, recipe, shape in TRAINING:
        for devices in flags.devices if flags.only in name else ():
            cfg = load_config(f"{flags.configs}/{recipe}.py")
            cfg.model.path, cfg.train.heads_path = "", ""
            if shape:
                cfg.model.arch = SHAPES[shape]
            with announced(f"compiling {name} for {devices}"):
                report = training(cfg, devices, flags.all_layers)
                add(trained, training_row(name, report, chip))
    for shape in DECODING:
        for devices in flags.devices if flags.only in shape else ():
            mesh = mesh_for(SHAPES[shape], devices)
            with announced(f"compiling decoding of {shape} for {devices}"):
                found = decoding(SHAPES[shape], mesh, jnp.bfloat16, flags.all_layers)
                add(decoded, decoding_row(shape, mesh, found, chip))
    for table in (trained, decoded):
        if table and not flags.json:
            names = [name for name in table[0] if name != "sent"]
            print(markdown_table(names, [[str(row[n]) for n in names] for row in table]))
    return 0


main = Program("python -m research scaling", Flags, run, EXAMPLES)
