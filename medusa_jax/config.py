"""The typed configuration of a training: plain dataclasses.

Only recipes and the command line (`--config.optim.lr=3e-4`) assign to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

from medusa_jax.arch import HeadsConfig as HeadsConfig
from medusa_jax.arch import LlamaConfig as LlamaConfig
from medusa_jax.bounds import AtLeast, AtMost, OneOf
from medusa_jax.notation import entries
from medusa_jax.typed import field_value

# A number of things of which there is at least one.
Positive = Annotated[int, AtLeast(1)]
# A number below 1.
Share = Annotated[float, AtMost(1 - 1e-6)]
# Names of other projects for a `data.format`.
ALIASES = {"chat": "messages", "openai": "messages", "chatml": "messages", "plain": "text"}
OPTIMIZERS = ("adamw", "adamw8bit", "muon")


@dataclass
class ModelConfig:
    """The backbone."""

    # A directory, GGUF file, hub id or name; empty = a random model of shape `arch`.
    path: str = ""
    # Directory or hub id of a tokenizer; empty = the model's.
    tokenizer: str = ""
    # Storage type of the frozen backbone; the trained part is always float32.
    param_dtype: Annotated[str, OneOf(("float32", "bfloat16", "float16"))] = "float32"
    # Layers to add after those of `path`: they start as the identity and must be trained.
    add_layers: int = 0
    # Kernels of a frozen backbone's layers in "int8" or "nf4" (4 bits); empty = unquantised.
    quantise: Annotated[str, OneOf(("", "int8", "nf4"))] = ""
    # The shape of a random model, and in a dry run of a model that is not on this machine.
    arch: LlamaConfig = field(default_factory=LlamaConfig)

    @property
    def tokenizer_path(self) -> str:
        """`tokenizer`, else the model's directory."""
        return self.tokenizer or self.path


@dataclass
class LoraConfig:
    """Adapters on every linear layer of a frozen backbone.

    The Medusa paper uses rank 32, alpha 16, dropout 0.05.
    """

    # 0 = no adapters.
    rank: int = 0
    # The adapters' output is multiplied by alpha / rank.
    alpha: float = 16.0
    # Dropout rate of the adapters' input.
    dropout: Share = 0.05


@dataclass
class DataConfig:
    """Where training text comes from and how it becomes rows of tokens."""

    # A .jsonl/.json file, a .parquet or .txt file, a directory with `tokens.npy` (see `training/data/rows.py`) or
    # with parquet or text files (.txt, .md, .py; a sample each), or a Hugging Face dataset id;
    # `training/data/conversations.py` has the fields. Several are separated by commas: each is packed, cached and
    # limited to `max_samples` separately, then their rows are shuffled together.
    source: str = ""
    # Split of a Hugging Face dataset.
    split: str = "train"
    # How to read samples: "auto" looks at each, "tokens" requires `tokens.npy`.
    format: Annotated[
        str, OneOf(("auto", "text", "sharegpt", "messages", "tokens"), ALIASES)
    ] = "auto"
    # Text for evaluation, like `source`.
    eval_source: str = ""
    # Samples to read of each text of `eval_source`, and rows to evaluate on.
    eval_samples: Positive = 256
    # Without `eval_source`: share of the samples of `source` that is kept for evaluation (packing first_fit).
    held_out: Share = 0.0
    # Tokens of a row.
    seq_len: Annotated[int, AtLeast(3)] = 2048
    # "first_fit" keeps samples whole, "concat" joins and splits (language modelling).
    packing: Annotated[str, OneOf(("first_fit", "concat"))] = "first_fit"
    # Name of a shipped chat template; empty = the tokenizer's.
    chat_template: str = ""
    # Samples of each source to read; 0 = all.
    max_samples: int = 0
    # Skip samples with a larger share of repeated 4-grams among the counted tokens: text of small models often
    # repeats itself, and heads would learn little else. 1 keeps all.
    max_repeats: float = 1.0
    # Seed of the order of rows.
    seed: int = 0
    # Token counts for choosing heads.draft_vocab tokens: the vocab_counts.npy of `distill`, or its directory;
    # empty = the counted tokens of `source`.
    draft_vocab_from: str = ""
    # Keep the frozen backbone's hidden states on disk in this type, computed once (stage medusa1); the size is
    # announced first. Empty = off.
    cache_features: Annotated[str, OneOf(("", "float32", "bfloat16", "float8"))] = ""
    # Directory of the hidden states (default: `<workdir>/features`); several runs may share it.
    features_path: str = ""

    @property
    def kept_share(self) -> float:
        """`held_out` where it applies: 0 with `eval_source`."""
        return 0.0 if entries(self.eval_source) else self.held_out


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    # "adamw8bit" stores both moments in 8 bits.
    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    # Peak learning rate of the backbone (or its adapters) if it is trained, else of the heads.
    lr: float = 2e-3
    # Steps of a linear warm-up; -1 = a twentieth of all steps.
    warmup_steps: Annotated[int, AtLeast(-1)] = 40
    # After the warm-up: half a cosine; constant, then linear decay in the last fifth ("wsd"); or constant.
    schedule: Annotated[str, OneOf(("cosine", "wsd", "constant"))] = "cosine"
    # Last learning rate of "cosine" and "wsd" as a share of `lr`.
    final_lr_ratio: float = 0.0
    # Decay of AdamW's first moment.
    b1: Share = 0.9
    # Decay of AdamW's second moment.
    b2: Share = 0.999
    # Above 0: a row without gradient is divided by it.
    eps: Annotated[float, AtLeast(1e-30)] = 1e-8
    # Of matrices; norm scales and biases do not decay.
    weight_decay: float = 0.0
    # Largest norm of the gradient of all parameters; 0 = no clipping.
    clip_norm: float = 1.0
    # Optimizer of heads that are trained together with a backbone; empty = `name`.
    heads_name: Annotated[str, OneOf(("", *OPTIMIZERS))] = ""
    # Learning rate of such heads as a multiple of `lr`.
    heads_lr_multiplier: float = 4.0
    # Type of the first moment of "adamw" and "muon": "bfloat16" saves a quarter of AdamW's state.
    moment_dtype: Annotated[str, OneOf(("float32", "bfloat16"))] = "float32"


@dataclass
class TrainConfig:
    """Stage, batch, schedule and losses of training."""

    # "backbone" (full-parameter language modelling), "medusa1" (heads on a frozen backbone), "medusa2" (heads and
    # the backbone of `model.path` together) or "native" (the same during fine-tuning or pre-training, from scratch
    # without `model.path`).
    stage: Annotated[str, OneOf(("backbone", "medusa1", "medusa2", "native"))] = "medusa1"
    # Rows of `seq_len` tokens per update over the whole mesh.
    batch_size: Positive = 64
    # Microbatches on one device; a mesh needs fewer for the same rows per device.
    accumulation: Positive = 1
    # Number of updates; 0 = `epochs`.
    steps: int = 0
    # Passes over the text if `steps` is 0.
    epochs: Positive = 2
    # Type of the computation.
    dtype: Annotated[str, OneOf(("float32", "bfloat16", "float16", "float64"))] = "bfloat16"
    # Recompute the backbone's layers in the backward pass, to save memory.
    remat: bool = True
    # Target positions per row whose logits exist at a time.
    loss_chunk: Positive = 256
    # Weight of head k (1-based) among the heads: lambda_k = lambda_decay^k.
    lambda_decay: float = 0.8
    # Weight of the heads' loss relative to the backbone's.
    lambda_0: float = 0.2
    # "sine": lambda_0 rises as sin(pi/2 * step / steps).
    lambda_0_schedule: Annotated[str, OneOf(("constant", "sine"))] = "constant"
    # Directory of heads to start from (two stages: the export of a medusa1 run); empty = fresh.
    heads_path: str = ""
    # The backbone's loss: "labels" (next-token cross-entropy) or "kl" (to the backbone before training:
    # self-distillation, Medusa 2.3.2).
    backbone_loss: Annotated[str, OneOf(("labels", "kl"))] = "labels"
    # Each head's loss: label_weight x cross-entropy with the text's token + teacher_weight x cross-entropy with
    # the backbone's distribution (Hydra 6.1, Amphista eq. 7) + feature_weight x smooth L1 between the features
    # that the head's logits are computed from and the backbone's hidden state (EAGLE; needs a shared LM head)
    # + distance_weight x the L1 distance of the head's and the backbone's probabilities (DSpark)
    # + confidence_weight x the error of the confidence in a guess (DSpark with `heads.confidence`).
    label_weight: float = 1.0
    teacher_weight: float = 0.0
    distance_weight: float = 0.0
    confidence_weight: float = 0.0
    # Whether that error also trains the block and the Markov head, as in DeepSpec and SpecForge.
    confidence_gradient: bool = False
    feature_weight: float = 0.0
    # EAGLE: number of draft levels in the loss. 1 for EAGLE-1 as released, 7 for EAGLE-3; each further level reads
    # the output of the previous one, as in decoding (HASS, EAGLE-3's training-time test).
    levels: Positive = 1
    # DFlash, DSpark: number of random positions of a row whose blocks a step trains; 0: all.
    anchors: int = 0
    # EAGLE, on the first level: + induction_weight x lambda_decay x mean of -log of the share of attention that the
    # first layer gives to earlier occurrences of the token to predict, 0 if there are none (`training/losses/induction.py`).
    induction_weight: float = 0.0
    # Noise on the hidden states that heads read in training: uniform(-1, 1) x this / sqrt(L d), d: width of all they read.
    hidden_noise: float = 0.0
    # Steps between log lines.
    log_every: Positive = 10
    # Steps between evaluations.
    eval_every: Positive = 500
    # Steps between checkpoints.
    save_every: Positive = 500
    # Checkpoints to keep.
    keep_checkpoints: Positive = 2
    # Stop after this many steps in a row whose loss or gradient is not finite.
    max_bad_steps: Positive = 10
    # Seed of fresh parameters, dropout and noise.
    seed: int = 0


@dataclass
class Config:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    # Devices along (data, fsdp, tensor); -1 = all remaining.
    mesh: tuple[int, int, int] = (1, -1, 1)
    # Directory of checkpoints, logs and results; `--workdir` sets it.
    workdir: str = ""
    # Print sizes and one sample with its counted tokens marked, then compile the real step, without training.
    dry_run: bool = False


def fields_of(owner: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted names of all fields ("optim.lr"), with the dataclass and the name in it."""
    for name in (f.name for f in fields(owner)):
        if is_dataclass(value := getattr(owner, name)):
            yield from fields_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", owner, name


def override(cfg: Config, path: str, value: Any) -> None:
    """Set the field at `path` ("optim.lr").

    Raises:
      KeyError: the configuration has no such field.
      UserError: a value outside the field's bounds.
    """
    owner, name = {p: (owner, name) for p, owner, name in fields_of(cfg)}[path]
    setattr(owner, name, field_value(owner, name, value, path))
