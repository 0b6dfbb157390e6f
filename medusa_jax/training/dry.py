"""Dry run: a sample of the text, then memory and traffic of a run from shapes and the compiled step."""

import math
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from medusa_jax.config import DataConfig
from medusa_jax.devices.chips import CHIPS
from medusa_jax.errors import UserError
from medusa_jax.files.families import model_fields
from medusa_jax.files.hub import is_here, resolve
from medusa_jax.heads import vocabulary
from medusa_jax.hlo.collectives import collectives, sent_by_kind
from medusa_jax.model.llama import init_params
from medusa_jax.model.quantise import quantise_backbone
from medusa_jax.notation import byte_size
from medusa_jax.sharding import PyTree, bytes_on_device
from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.training.data import sources
from medusa_jax.training.data.hidden_store import encode
from medusa_jax.training.data.rows import ROW
from medusa_jax.training.data.tokenise import samples_of
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.placement import batch_shapes, compile_step, placed_shapes
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.stage import Stage, make_stage
from medusa_jax.training.step import TrainState, init_state, make_step
from medusa_jax.whole_files import Json


class Shapes(NamedTuple):
    """A training step and its arguments, as shapes with shardings.

    Attributes:
      step: step(state, frozen, batch).
    """

    step: Callable
    state: TrainState
    frozen: PyTree
    batch: PyTree
    mesh: Mesh


def dry_run(plan: RunPlan) -> Json:
    """Print and return the requirements of a run: `sizes`, then `figures`.

    With local text and a local tokenizer it prints a sample, its counted tokens marked.
    """
    tokenizer, named = plan.model.tokenizer_path, sources.places(plan.data.source)
    if named and os.path.exists(named[0]) and is_here(tokenizer):
        print(preview(plan.data, tokenizer))
    shapes = shapes_of(plan)
    report = sizes(shapes)
    mesh = ", ".join(f"{name} {n}" for name, n in report["mesh"].items())
    print(f"stage {plan.train.stage} in {plan.train.dtype}, devices: {mesh}")
    if plan.model.path and is_here(plan.model.path):
        directory = resolve(plan.model.path, ["config.json"])
        print(f"family                {model_fields(directory).get('model_type')}")
    for kind, groups in (("frozen", shapes.frozen), ("trained", shapes.state.params)):
        for name, group in groups.items():
            print(f"{kind + ' ' + name:21} {byte_size(stored_bytes(group))}")
    micro, rows, length = report["batch"]
    stored = " + ".join(f"{byte_size(n)} {name}" for name, n in report["stored"].items())
    total = byte_size(sum(report["stored"].values()))
    print(f"trainable parameters  {report['trainable_parameters']:,}")
    print(f"batch                 {micro} x {rows} rows of {length} tokens per update")
    # Flushed, since compiling may take long.
    print(f"stored per device     {stored} = {total}", flush=True)
    begin = time.monotonic()
    report |= figures(plan, compile_step(*shapes))
    traffic = [f"{byte_size(n)} {kind}" for kind, n in report["sent_bytes"].items()]
    fits = [c.title for c in CHIPS.values() if report["total_bytes"] <= c.memory]
    print(
        f"memory per device     {byte_size(report['argument_bytes'])} arguments + "
        f"{byte_size(report['temporary_bytes'])} temporaries = {byte_size(report['total_bytes'])}"
    )
    print(f"fits                  {', '.join(fits) or 'no chip in the table'}")
    print(f"sent by each device   {' + '.join(traffic) or 'nothing'} per update")
    seconds = time.monotonic() - begin
    print(f"compiled in           {seconds:.1f} s on {jax.default_backend()}")
    return report


def shapes_of(plan: RunPlan) -> Shapes:
    """The step of a plan, with `plan.train.steps` or 1000 updates; nothing is read or computed."""
    train, data, mesh = plan.train, plan.data, plan.mesh
    steps = train.steps or 1000
    stage = make_stage(train, plan.arch, plan.groups, plan.drafter, plan.lora, steps, mesh)
    optimizer = make_optimizer(plan.optim, plan.groups, steps)
    frozen = placed_shapes(mesh, frozen_shapes(plan))
    begin = partial(init_state, stage, optimizer, mesh, seed=train.seed)
    state = placed_shapes(mesh, jax.eval_shape(begin, frozen))
    schedule = make_schedule(plan.optim, steps)
    step = make_step(stage, optimizer, schedule, train.seed, mesh)
    kinds = ((name, np.dtype(kind)) for name, kind in ROW.items())
    row = {name: jax.ShapeDtypeStruct((data.seq_len,), kind) for name, kind in kinds}
    if data.cache_features:
        row["hidden"] = hidden_shape(data.cache_features, data.seq_len, stage)
    batch = batch_shapes(mesh, row, plan.microbatch, train.accumulation)
    return Shapes(step, state, frozen, batch, mesh)


def hidden_shape(kind: str, T: int, stage: Stage) -> jax.ShapeDtypeStruct:
    """The hidden states of a row, as `data.cache_features` stores them."""
    states = jax.ShapeDtypeStruct((1, T, stage.width), jnp.float32)
    D = stage.llama.config.d_model
    codes = jax.eval_shape(partial(encode, kind, D=D), states)
    return jax.ShapeDtypeStruct(codes.shape[1:], codes.dtype)


def frozen_shapes(plan: RunPlan) -> PyTree:
    """Shapes of the frozen groups that `models.load_setup` would load."""

    def backbone(key: jax.Array) -> PyTree:
        params = init_params(plan.arch, key, jnp.dtype(plan.model.param_dtype))
        kind = plan.model.quantise
        return quantise_backbone(params, kind) if kind else params

    key, frozen = jax.eval_shape(lambda: jax.random.key(0)), {}
    if "backbone" not in plan.groups:
        frozen["backbone"] = jax.eval_shape(backbone, key)
    elif plan.train.backbone_loss == "kl":
        frozen["teacher"] = jax.eval_shape(backbone, key)
    if plan.drafter and (n := plan.drafter.heads.draft_vocab):
        ids_O = jax.ShapeDtypeStruct((n,), jnp.int32)
        frozen[vocabulary.GROUP] = {"ids": ids_O}
    return frozen


def sizes(shapes: Shapes) -> Json:
    """Figures from shapes alone; `stored` has the exact bytes per device of a step's arguments."""
    params = shapes.state.params
    groups = (shapes.frozen, params)
    return {
        "mesh": dict(shapes.mesh.shape),
        "devices": shapes.mesh.size,
        "backbone_bytes": stored_bytes((shapes.frozen | params)["backbone"]),
        "trainable_parameters": count(params),
        "batch": list(shapes.batch["tokens"].shape),
        "stored": {
            "parameters": bytes_on_device(groups),
            "moments": bytes_on_device(shapes.state.opt),
            "batch": bytes_on_device(shapes.batch),
        },
    }


def figures(plan: RunPlan, compiled: Compiled) -> Json:
    """Memory and traffic of each device, from the compiled step."""
    # Loops of unknown length are those over chunks of the loss; assume that all tokens count.
    chunks = -(-plan.data.seq_len // plan.train.loss_chunk)
    sent_bytes = sent_by_kind(collectives(compiled.as_text() or ""), chunks)
    return memory_of(compiled) | {"sent_bytes": sent_bytes}


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
    shardings = jax.tree.leaves(compiled.input_shardings)
    if any(d.platform == "tpu" for x in shardings[:1] for d in x.device_set):
        # A TPU's temporaries are not those of its main memory alone: programs compile under limits below
        # their sum. The peak is that of the buffers.
        temporaries = memory.peak_memory_in_bytes - arguments - outputs
    return {
        "argument_bytes": arguments,
        "temporary_bytes": temporaries,
        "total_bytes": arguments + temporaries + outputs,
    }


def stored_bytes(tree: PyTree) -> int:
    """Bytes of all leaves."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


def count(tree: PyTree) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def preview(data: DataConfig, tokenizer: str) -> str:
    """The first usable sample of `data.source`, with its counted tokens inside ⟦ ⟧; "" of a token directory.

    Raises:
      UserError: the source is unreadable or has no usable sample, or no tokenizer is given.
    """
    source = sources.names(data.source)[0]
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        return ""
    samples, encode = samples_of(source, tokenizer, data)
    problems = {}
    for number, record in enumerate(samples):
        sample = encode(record)
        if not sample.pieces:
            problems[number] = sample.problem
            continue
        ids, counts = sample.pieces[0]
        n = min(len(ids), data.seq_len) if data.packing == "first_fit" else len(ids)
        counted = [c > 0 for c in counts[:n]]
        return (
            f"{mark_counted(encode.tokenizer, ids[:n], counted)}\n{'-' * 60}\n"
            f"sample {number + 1} of {len(samples)} in {source} ({sample.form}): {n} of {len(ids)} tokens, "
            f"{sum(counted)} of them counted (the loss is computed on these): ⟦like this⟧"
        )
    raise UserError(
        f"none of the {len(samples)} samples of {source} can be used: "
        f"{sources.reasons(problems, samples)}"
    )


def mark_counted(tokenizer: Tokenizer, ids: list[int], counted: list[bool]) -> str:
    """Text of the ids, special tokens included, each run of counted ones inside ⟦ ⟧.

    A counted line break is shown as ↵. A character with bytes in several tokens belongs to the run that completes
    it.

    Example: ids of "Hi. Yo</s>" with the last two counted -> "Hi. ⟦Yo</s>⟧".
    """
    text, end, decoded = "", 0, ""
    for is_counted, group in groupby(counted):
        end += len(list(group))
        prefix = tokenizer.decode(ids[:end], skip_special=False)
        if end < len(ids):
            prefix = prefix.rstrip("\ufffd")
        piece, decoded = prefix[len(decoded) :], prefix
        if is_counted:
            lines = piece.replace("\n", "↵\n").split("\n")
            piece = "\n".join(f"⟦{x}⟧" if x else x for x in lines)
        text += piece
    return text
