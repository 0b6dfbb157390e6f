"""The typed configuration of a training: plain dataclasses.

Only the command line assigns to them (`--config.optim.lr=3e-4`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

from medusa_jax.arch import HeadsConfig as HeadsConfig
from medusa_jax.arch import LlamaConfig as LlamaConfig
from medusa_jax.bounds import AtLeast, AtMost, OneOf

# A number of things of which there is at least one.
Positive = Annotated[int, AtLeast(1)]
# A number below 1.
Share = Annotated[float, AtMost(1 - 1e-6)]
# Names of other projects for a `data.format`.
ALIASES = {"chat": "messages", "openai": "messages", "chatml": "messages", "plain": "text"}
OPTIMIZERS = ("adamw", "adamw8bit", "muon")


@dataclass
class ModelConfig:
    """Which backbone: a directory, GGUF file, hub id or name, or (path empty) `arch` at random."""

    path: str = ""
    # Empty = the tokenizer in the model's directory.
    tokenizer: str = ""
    # Storage type of the frozen backbone; the trained part is always float32.
    param_dtype: Annotated[str, OneOf(("float32", "bfloat16", "float16"))] = "float32"
    # Layers to add after those of `path`: they start as the identity and must be trained.
    add_layers: int = 0
    # Kernels of a frozen backbone's layers in "int8" or "nf4" (4 bits); empty = unquantised.
    quantise: Annotated[str, OneOf(("", "int8", "nf4"))] = ""
    arch: LlamaConfig = field(default_factory=LlamaConfig)

    @property
    def tokenizer_path(self) -> str:
        """`tokenizer`, else the model's directory."""
        return self.tokenizer or self.path


@dataclass
class LoraConfig:
    """Adapters on every linear layer of a frozen backbone; rank 0: none.

    The Medusa paper uses rank 32, alpha 16, dropout 0.05.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: Share = 0.05


@dataclass
class DataConfig:
    """Where training text comes from and how it becomes rows of tokens.

    `source` is a .jsonl/.json file, a .parquet or .txt file, a directory with `tokens.npy` (see
    `training/data/rows.py`) or with parquet or text files (.txt, .md, .py; a sample each), or a Hugging Face
    dataset id; `training/data/conversations.py` has the fields. Several are separated by commas: each is packed,
    cached and limited to `max_samples` separately, then their rows are shuffled together.
    `format`: "auto", "text", "sharegpt", "messages" or "tokens".
    """

    source: str = ""
    split: str = "train"
    format: Annotated[
        str, OneOf(("auto", "text", "sharegpt", "messages", "tokens"), ALIASES)
    ] = "auto"
    eval_source: str = ""
    eval_samples: Positive = 256
    # Without `eval_source`: share of the samples of `source` that is kept for evaluation (packing first_fit).
    held_out: Share = 0.0
    seq_len: Annotated[int, AtLeast(3)] = 2048
    # "first_fit" keeps samples whole, "concat" joins and splits (language modelling).
    packing: Annotated[str, OneOf(("first_fit", "concat"))] = "first_fit"
    # Name of a shipped chat template; empty = the tokenizer's.
    chat_template: str = ""
    max_samples: int = 0
    # Skip samples with a larger share of repeated 4-grams among the counted tokens: text of small models often
    # repeats itself, and heads would learn little else. 1 keeps all.
    max_repeats: float = 1.0
    seed: int = 0
    # Token counts for choosing heads.draft_vocab tokens: the vocab_counts.npy of `distill`, or its directory;
    # empty = the counted tokens of `source`.
    draft_vocab_from: str = ""
    # "float32", "bfloat16" or "float8": keep the frozen backbone's hidden states on disk, computed
    # once (stage medusa1); the size is announced first. Empty = off.
    cache_features: Annotated[str, OneOf(("", "float32", "bfloat16", "float8"))] = ""
    # Directory of the hidden states (default: <workdir>/features); several runs may share it.
    features_path: str = ""


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule.

    `name`: "adamw", "adamw8bit" (both moments in 8 bits) or "muon". `moment_dtype` is the type
    of the first moment of the other two: "bfloat16" saves a quarter of AdamW's state.

    `lr` is the peak learning rate of the backbone (or its adapters) if it is trained, else of the heads. Heads
    trained together with a backbone use `lr` times `heads_lr_multiplier` and the optimizer `heads_name` (empty =
    `name`).
    """

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    lr: float = 2e-3
    # -1: a twentieth of the steps.
    warmup_steps: Annotated[int, AtLeast(-1)] = 40
    schedule: Annotated[str, OneOf(("cosine", "wsd", "constant"))] = "cosine"
    final_lr_ratio: float = 0.0
    b1: Share = 0.9
    b2: Share = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    heads_name: Annotated[str, OneOf(("", *OPTIMIZERS))] = ""
    heads_lr_multiplier: float = 4.0
    moment_dtype: Annotated[str, OneOf(("float32", "bfloat16"))] = "float32"


@dataclass
class TrainConfig:
    """Stage, batch, schedule and losses of training.

    `stage`: "backbone" (full-parameter language modelling), "medusa1" (heads on a frozen
    backbone), "medusa2" (heads and the backbone of `model.path` together) or "native" (the same during
    fine-tuning or pre-training, from scratch without `model.path`).

    `batch_size` counts rows of `seq_len` tokens per update over the whole mesh. `accumulation` is the number of
    microbatches on one device; a mesh needs fewer for the same rows per device. With `steps` = 0, `epochs`
    applies.
    """

    stage: Annotated[str, OneOf(("backbone", "medusa1", "medusa2", "native"))] = "medusa1"
    batch_size: Positive = 64
    accumulation: Positive = 1
    steps: int = 0
    epochs: Positive = 2
    dtype: Annotated[str, OneOf(("float32", "bfloat16", "float16", "float64"))] = "bfloat16"
    remat: bool = True
    # Target positions per row whose logits exist at a time.
    loss_chunk: Positive = 256
    # Weight of head k (1-based) among the heads: lambda_k = lambda_decay^k.
    lambda_decay: float = 0.8
    # Weight of the heads' loss relative to the backbone's: "constant", or "sine": it rises as
    # sin(pi/2 * step / steps).
    lambda_0: float = 0.2
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
    feature_weight: float = 0.0
    # EAGLE: number of draft levels in the loss. 1 for EAGLE-1 as released, 7 for EAGLE-3; each further level reads
    # the output of the previous one, as in decoding (HASS, EAGLE-3's training-time test).
    levels: Positive = 1
    # DFlash, DSpark: number of random positions of a row whose blocks a step trains; 0: all.
    anchors: int = 0
    # EAGLE, on the first level: + induction_weight x lambda_decay x mean of -log of the share of attention that the
    # first layer gives to earlier occurrences of the token to predict, 0 if there are none (`training/losses/induction.py`).
    induction_weight: float = 0.0
    # Noise on the hidden states that heads read in training: uniform(-1, 1) x this / sqrt(L d).
    hidden_noise: float = 0.0
    log_every: Positive = 10
    eval_every: Positive = 500
    save_every: Positive = 500
    keep_checkpoints: Positive = 2
    max_bad_steps: Positive = 10
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
