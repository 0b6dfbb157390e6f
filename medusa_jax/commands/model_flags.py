"""Flags of a model and of the texts that it writes, and the model that they ask for."""

import dataclasses
from typing import TYPE_CHECKING, Any

from medusa_jax.arch import ACTIVATION_BITS, DRAFT_WEIGHTS, DTYPES, WEIGHTS
from medusa_jax.commands.flags import flag, numbers, values_of
from medusa_jax.console import inform
from medusa_jax.errors import UserError

if TYPE_CHECKING:  # commands import JAX when they run, not for --help
    from medusa_jax.api import Model, Options
    from medusa_jax.learning.learner import Learner


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseFlags:
    """The model."""

    model: str | None = flag(
        "directory, .gguf file, hub id or name (smollm2) of a model (default: the demo)",
        None,
    )
    dtype: str | None = flag(
        "type to compute in (default: float32 on CPU, bfloat16 elsewhere)",
        None,
        choices=DTYPES,
    )
    weights: str | None = flag(
        "type to read kernels in: those of a GGUF file as stored, multiplied by integers (see "
        "--activations), or unpacked to float32; bfloat16 and int8 round the model (default: stored for a GGUF file on a "
        "CPU with native products, else the dtype)",
        None,
        choices=WEIGHTS,
    )
    draft_weights: str | None = flag(
        "type to store kernels of draft heads in (default: int8 on a CPU with native products while "
        "only speed depends on it; else, and for typical and rejection, as --weights)",
        None,
        choices=DRAFT_WEIGHTS,
    )
    activations: int = flag(
        "bits of the activations that stored and int8 weights are multiplied by on a CPU; 8 is "
        "llama.cpp's precision",
        16,
        choices=ACTIVATION_BITS,
    )
    context: int | None = flag(
        "most tokens of a prompt and its text (default: the model's; for LongRoPE the original context, beyond which all "
        "texts take the long factors)",
        None,
    )
    allow_other_base: bool = flag(
        "use heads that were trained on another model of the same sizes", False
    )
    no_repeat_ngram_size: int | None = flag(
        "no N tokens in a row twice in prompt and text; 0 is off (default: that of the model's "
        "generation_config.json)",
        None,
        metavar="N",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(BaseFlags):
    """The model and its drafter."""

    drafter: str | None = flag(
        "a name, a directory, file or hub id with heads, prompt_lookup, draft_model or draft_model:PATH, "
        "module:Class or module:Class:PATH of a drafter of yours, or none (default: hydra for the demo, "
        "heads bundled with a name or with a model's weights, none for another model)",
        None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFlags:
    """The devices that a model is spread over."""

    mesh: tuple[int, ...] = flag(
        "devices along data,fsdp,tensor", (1, 1, 1), type=numbers()
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnFlags(MeshFlags):
    """Devices, and learning from answers."""

    learn: str | None = flag(
        "the draft heads learn from the answers while nothing else runs, and keep it in this directory "
        "(docs/learning.md); no text depends on it",
        None,
        metavar="DIR",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationFlags:
    """The length of a text, and how it is drawn."""

    max_new_tokens: int = flag("most tokens of a text", 200)
    temperature: float = flag("0 is greedy", 0.0)
    repetition_penalty: float | None = flag(
        "over 1, tokens of the prompt and the text become less likely (default: the model's "
        "generation_config.json, else 1)",
        None,
    )
    seed: int = flag("of the draws", 0)


def load_model(
    flags: BaseFlags, drafter: str | None = None, *, needs_heads: bool = False, **more: Any
) -> "Model":
    """The model that the flags ask for, with --drafter if no other is given.

    Args:
      needs_heads: refuse plain decoding.
      more: further arguments of `load`, such as `tree`.
    """
    import jax  # here, not for --help

    from medusa_jax.api import default_drafter, load

    choice = drafter or (flags.drafter if isinstance(flags, ModelFlags) else None)
    name = choice or default_drafter(flags.model)
    if needs_heads and name == "none":
        whose = flags.model or "the demo"
        raise UserError(f"give --drafter the directory or hub id of heads for {whose}")
    if flags.dtype == "float64":  # a switch of the whole process
        jax.config.update("jax_enable_x64", True)
    arguments = values_of(flags, BaseFlags)
    if isinstance(flags, MeshFlags):
        arguments["mesh"] = flags.mesh
    model = load(arguments.pop("model"), name, **arguments | more)
    if choice is None and name == "none":
        inform("no --drafter is given: plain decoding, without drafts")
    return model


def to_repeat(flags: ModelFlags, following: type) -> dict[str, str]:
    """The given flags that the next command has, too, for `print_next`; not --max_new_tokens, which is for one call."""
    theirs = {field.name for field in dataclasses.fields(following)} - {"max_new_tokens"}
    words = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if field.name in theirs and value != field.default:
            value = ",".join(map(str, value)) if isinstance(value, tuple) else value
            words[field.name] = "" if value is True else str(value)
    return words


def make_learner(flags: LearnFlags, model: "Model") -> "Learner | None":
    """What --learn asks for."""
    if flags.learn is None:
        return None
    from medusa_jax.learning.learner import Learner  # here: it imports the training losses

    return Learner(model, flags.learn)


def generation_options(flags: GenerationFlags, **more: Any) -> "Options":
    """The `Options` that the flags ask for, and `more` of its fields."""
    from medusa_jax.api import Options

    return Options(**values_of(flags, GenerationFlags), **more)
