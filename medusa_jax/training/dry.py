"""Dry run: compile the real step from shapes and report its requirements."""

import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from medusa_jax.config import Config
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary
from medusa_jax.hlo.collectives import collectives, sent_by_kind
from medusa_jax.interop.hub import is_here, resolve
from medusa_jax.model.llama import init_params
from medusa_jax.model.quantise import quantise_backbone
from medusa_jax.sharding import PyTree, make_mesh, param_shardings, shapes_with
from medusa_jax.training import checks, planning
from medusa_jax.training.counted import (
    CPU_ONLY,
    TPU_ONLY,
    has_temporaries,
    total_bytes,
    training_bytes,
)
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.stage import make_stage
from medusa_jax.training.step import (
    Shapes,
    TrainState,
    abstract_batch,
    compile_step,
    make_step,
    state_shardings,
)
from medusa_jax.whole_files import Json

GIB = 2**30


def dry_run(cfg: Config) -> Json:
    """Print and return the requirements of a run: `sizes`, then `measure`.

    With "counted" the step is not compiled. The shape is that of a local `model.path`, else
    `cfg.model.arch`; nothing is downloaded.

    Raises:
      UserError: inconsistent sizes.
    """
    if is_here(cfg.model.path):
        from medusa_jax.interop.hf import model_shape

        cfg.model.arch = model_shape(resolve(cfg.model.path, ["config.json"]))
    shapes = step_shapes(cfg)
    report = sizes(cfg, shapes)
    _print_sizes(cfg, report, shapes.frozen, shapes.state.params)
    if cfg.dry_run != "counted":
        report = measure(cfg, shapes)
        _print_compiled(report)
    return report


def step_shapes(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Shapes:
    """The step of a run, nothing read and nothing computed.

    Args:
      devices: as for `make_mesh`.

    Raises:
      UserError: inconsistent sizes.
    """
    mesh = make_mesh(cfg.mesh, devices)
    checks.fit_accumulation(cfg, mesh)
    checks.check(cfg, mesh)
    steps = cfg.train.steps or 1000
    stage = make_stage(cfg, steps, mesh)
    schedule = make_schedule(cfg.optim, steps)
    optimizer = make_optimizer(cfg.optim, trained_groups(cfg), steps)
    key = jax.eval_shape(lambda: jax.random.key(0))
    frozen = frozen_shapes(cfg, key)
    frozen = shapes_with(frozen, param_shardings(mesh, frozen))
    params = jax.eval_shape(stage.init, key, frozen)
    counter = jax.eval_shape(lambda: jnp.zeros((), jnp.int32))
    abstract = TrainState(counter, counter, params, jax.eval_shape(optimizer.init, params))
    state = shapes_with(abstract, state_shardings(mesh, abstract))
    step = make_step(stage, optimizer, schedule, cfg.train.seed, mesh)
    return Shapes(step, state, frozen, abstract_batch(cfg, mesh), mesh)


def sizes(cfg: Config, shapes: Shapes) -> Json:
    """Figures from shapes alone: parameters, mesh, FLOPs and `counted`, bytes per device."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    parameters = count(jax.eval_shape(lambda k: init_params(cfg.model.arch, k), key))
    params, tokens = shapes.state.params, shapes.batch["tokens"]
    return {
        "stage": cfg.train.stage,
        "mesh": dict(shapes.mesh.shape),
        "devices": shapes.mesh.size,
        "backbone_parameters": parameters,
        "backbone_bytes": stored_bytes((shapes.frozen | params)["backbone"]),
        "trainable_parameters": count(params),
        "batch": list(tokens.shape),
        "counted": training_bytes(cfg, shapes),
        "flops": tokens.size * planning.flops_per_token(cfg, params),
    }


def measure(cfg: Config, shapes: Shapes) -> Json:
    """Compile the step; return `sizes`, memory and traffic per device.

    Raises:
      UserError: the backend does not report memory.
    """
    begin = time.monotonic()
    compiled = compile_step(*shapes)
    seconds = time.monotonic() - begin
    return sizes(cfg, shapes) | figures(cfg, compiled) | {"compile_seconds": seconds}


def figures(cfg: Config, compiled: Compiled) -> Json:
    """Memory and traffic of each device, from the compiled step."""
    # Loops of unknown length are those over chunks of the loss; assume that all tokens count.
    chunks = -(-cfg.data.seq_len // cfg.train.loss_chunk)
    sent = sent_by_kind(collectives(compiled.as_text() or ""), chunks)
    return memory_of(compiled) | {"sent_bytes": sent}


def memory_of(compiled: Compiled) -> Json:
    """Bytes of a compiled program on each device: arguments, temporaries, total.

    Raises:
      UserError: the backend does not report them.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise UserError("this backend does not report the memory of a compiled program")
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    # Donated buffers are counted as arguments and as output, but exist once.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    if _is_for_tpu(compiled):
        # A TPU's temporaries are not those of its main memory alone: programs compile under limits below
        # their sum (docs/accelerators.md). The peak is that of the buffers.
        temporaries = memory.peak_memory_in_bytes - arguments - outputs
    return {
        "argument_bytes": arguments,
        "temporary_bytes": temporaries,
        "total_bytes": arguments + temporaries + outputs,
    }


def _is_for_tpu(compiled: Compiled) -> bool:
    shardings = jax.tree.leaves(compiled.input_shardings)
    return any(d.platform == "tpu" for x in shardings[:1] for d in x.device_set)


def frozen_shapes(cfg: Config, key: jax.ShapeDtypeStruct) -> PyTree:
    """Shapes of the frozen groups that `setup.load_setup` would load."""
    dtype = jnp.dtype(cfg.model.param_dtype)

    def backbone(key: jax.Array) -> PyTree:
        params = init_params(cfg.model.arch, key, dtype)
        kind = cfg.model.quantise
        return quantise_backbone(params, kind) if kind else params

    trained, frozen = trained_groups(cfg), {}
    if "backbone" not in trained:
        frozen["backbone"] = jax.eval_shape(backbone, key)
    elif cfg.train.backbone_loss == "kl":
        frozen["teacher"] = jax.eval_shape(backbone, key)
    if "heads" in trained and cfg.heads.draft_vocab:
        ids_O = jax.ShapeDtypeStruct((cfg.heads.draft_vocab,), jnp.int32)
        frozen[vocabulary.GROUP] = {"ids": ids_O}
    return frozen


def stored_bytes(tree: PyTree) -> int:
    """Bytes of all leaves."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


def count(tree: PyTree) -> int:
    """Number of parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _print_sizes(cfg: Config, r: Json, frozen: PyTree, params: PyTree) -> None:
    """Print every group of parameters, then the sums; flushed, since compiling may take long."""

    def group(title: str, tree: PyTree) -> None:
        for name, part in sorted(tree.items()):
            if name.endswith("_0") or "_" not in name or not name[-1].isdigit():
                shapes = jax.tree_util.tree_flatten_with_path(part)[0]
                n_alike = sum(
                    other.rsplit("_", 1)[0] == name.rsplit("_", 1)[0] for other in tree
                )
                times = f" (x {n_alike})" if name.endswith("_0") else ""
                for path, leaf in shapes:
                    inner = "/".join([name, *(str(k.key) for k in path)])
                    print(f"  {title} {inner}{times}: {leaf.dtype}{list(leaf.shape)}")

    micro, rows, length = r["batch"]
    print(f"stage {r['stage']} in {cfg.train.dtype}, mesh {r['mesh']}")
    for name, part in frozen.items():
        group(f"frozen {name}", part)
    for name, part in params.items():
        group(f"trained {name}", part)
    print(f"backbone parameters   {r['backbone_parameters']:,} "
          f"in {r['backbone_bytes'] / GIB:.2f} GiB")  # fmt: skip
    print(f"trainable parameters  {r['trainable_parameters']:,}")
    print(f"batch                 {micro} x {rows} x {length} tokens per update")
    print(f"counted per device    {_counted(cfg, r['counted'])}", flush=True)


def _counted(cfg: Config, counted: dict[str, int]) -> str:
    """Sums of the counted bytes; what only one platform needs is listed separately."""
    stored = sum(counted[name] for name in ("parameters", "moments", "batch"))
    if not has_temporaries(cfg):
        return f"{stored / GIB:.2f} GiB stored; temporaries are known once it is compiled"
    total = total_bytes(counted, "any")
    more = ", ".join(
        f"{name} {counted[name] / GIB:.2f} more"
        for name in (TPU_ONLY, CPU_ONLY)
        if counted[name]
    )
    return (
        f"{stored / GIB:.2f} GiB stored + {(total - stored) / GIB:.2f} GiB temporaries = "
        f"{total / GIB:.2f} GiB" + f" ({more})" * bool(more)
    )


def _print_compiled(r: Json) -> None:
    """Print the memory of the compiled program and lower bounds of an update's time."""
    print(f"memory per device     {r['argument_bytes'] / GIB:.2f} GiB arguments + "
          f"{r['temporary_bytes'] / GIB:.2f} GiB temporaries = {r['total_bytes'] / GIB:.2f} GiB")  # fmt: skip
    print(*planning.lines(r), sep="\n")
    print(f"compiled in           {r['compile_seconds']:.1f} s on {jax.default_backend()}")
