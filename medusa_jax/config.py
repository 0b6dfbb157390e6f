"""Typed configuration: plain dataclasses that import nothing.

`LlamaConfig` and `HeadsConfig` are hashable, so they can be attributes of Flax modules and
static arguments of `jax.jit`. They stay mutable because the command line overrides fields in
place (`--config.optim.lr=3e-4`); nothing else may assign to them.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(unsafe_hash=True)
class LlamaConfig:
    """Shape of a Llama-family backbone (Llama, Mistral, Qwen2, Qwen3).

    Fields carry the meaning of the Hugging Face config they are read from.
    """

    vocab_size: int = 32000
    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 32
    head_dim: int = 128
    d_ff: int = 11008
    max_position: int = 4096
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    # "none", "linear" or "llama3"; the four numbers below only matter for the last two.
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position: int = 8192
    tie_embeddings: bool = False
    # 0 = no window. A query at position p sees keys at positions > p - sliding_window.
    sliding_window: int = 0
    # Index of the first layer that uses the window (Qwen2's max_window_layers).
    sliding_window_start_layer: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(unsafe_hash=True)
class HeadsConfig:
    """A set of draft heads.

    `lm_head` is where a head's logits come from: "own" (a full D x V matrix per head, as in the
    paper), "shared" (the backbone's LM head) or "low_rank" (D x rank x V per head).

    `draft_vocab` is how many tokens a head scores, the most frequent ones (`heads/vocabulary.py`);
    0 is all of them.
    """

    drafter: str = "medusa"
    n_heads: int = 5
    n_layers: int = 1
    lm_head: str = "own"
    rank: int = 256
    draft_vocab: int = 0


@dataclass
class ModelConfig:
    """Which backbone: a directory, GGUF file, hub id or name, or (path empty) `arch` at random."""

    path: str = ""
    # Empty = the tokenizer that lies beside the model.
    tokenizer: str = ""
    # Storage type of the frozen backbone; the trained part is always float32.
    param_dtype: str = "float32"
    # Layers to put behind those of `path`: they start as the identity and must be trained.
    add_layers: int = 0
    # Kernels of a frozen backbone's layers in "int8" or "nf4" (4 bits); empty = as they are.
    quantise: str = ""
    arch: LlamaConfig = field(default_factory=LlamaConfig)


@dataclass
class LoraConfig:
    """Adapters on every linear layer of a frozen backbone that train in its place; rank 0: none.

    The paper's figures are rank 32, alpha 16, dropout 0.05.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.05


@dataclass
class DataConfig:
    """Where training text comes from and how it becomes rows of tokens.

    `source` is a .jsonl/.json file, a .txt file, a directory with `tokens.npy` (see
    `training/data/rows.py`) or with text files (.txt, .md, .py; a sample each) or a Hugging Face
    dataset id, or several of them with commas between: each is packed and its hidden states cached
    by itself, their rows are shuffled together, and `max_samples` counts in each. `format`: "auto",
    "text", "sharegpt", "messages" or "tokens".
    """

    source: str = ""
    split: str = "train"
    format: str = "auto"
    eval_source: str = ""
    eval_samples: int = 256
    seq_len: int = 2048
    # "first_fit" keeps samples whole, "concat" joins and splits (language modelling).
    packing: str = "first_fit"
    # Name of a shipped chat template; empty = the tokenizer's own.
    chat_template: str = ""
    max_samples: int = 0
    # Samples of which a larger share of the counted 4-grams are repeats are left out: small models
    # run in circles, and heads would learn little else. 1 keeps all.
    max_repeats: float = 1.0
    seed: int = 0
    # Counts to choose heads.draft_vocab tokens by: the vocab_counts.npy that `distill` keeps, or its
    # directory; empty = the counted tokens of `source`.
    draft_vocab_from: str = ""
    # Print one sample with its counted tokens marked, train nothing.
    preview: bool = False
    # "float32", "bfloat16" or "float8": keep the frozen backbone's hidden states on disk, computed
    # once (stage medusa1); the size is announced first. Empty = off.
    cache_features: str = ""
    # Where they are kept (default: <workdir>/features); several runs may share a folder.
    features_path: str = ""


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule.

    `name`: "adamw", "adamw8bit" (both moments in 8 bits) or "muon". `moment_dtype` is the type
    of the first moment of the other two: "bfloat16" saves a quarter of AdamW's state.

    `lr` is the peak rate of what the stage trains: the backbone (or its adapter) where that is
    trained, else the heads. Heads trained together with a backbone take `lr` times
    `heads_lr_multiplier` and the rule `heads_name` (empty = `name`).
    """

    name: str = "adamw"
    lr: float = 2e-3
    warmup_steps: int = 40
    schedule: str = "cosine"
    final_lr_ratio: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    heads_name: str = ""
    heads_lr_multiplier: float = 4.0
    moment_dtype: str = "float32"


@dataclass
class TrainConfig:
    """How long and in what portions to train.

    `stage`: "backbone" (full-parameter language modelling), "medusa1" (heads on a frozen
    backbone), "medusa2" (heads and the backbone of `model.path` together) or "native" (the same
    along with fine-tuning or pre-training, from scratch if there is no `model.path`).

    `batch_size` counts rows of `seq_len` tokens over the whole mesh, per update;
    `accumulation` is into how many microbatches one device would split it; over a mesh there are
    fewer, so that each device takes as many rows at a time. `steps` = 0 means `epochs` decide.
    """

    stage: str = "medusa1"
    batch_size: int = 64
    accumulation: int = 1
    steps: int = 0
    epochs: int = 2
    dtype: str = "bfloat16"
    remat: bool = True
    # Target positions whose logits exist at once, per row of the microbatch.
    loss_chunk: int = 256
    # Weight of head k (1-based) among the heads: lambda_k = lambda_decay^k.
    lambda_decay: float = 0.8
    # Weight of all heads beside the backbone's own loss: "constant", or "sine": rising over
    # the run as sin(pi/2 * step / steps).
    lambda_0: float = 0.2
    lambda_0_schedule: str = "constant"
    # Directory of heads to start from (two stages: the export of a medusa1 run); empty = fresh.
    heads_path: str = ""
    # The backbone's own loss: "labels" (next-token cross-entropy) or "kl" (to the backbone as
    # it was: self-distillation, 2.3.2).
    backbone_loss: str = "labels"
    # Each head's loss: label_weight x cross-entropy with the text's token + teacher_weight x
    # cross-entropy with the backbone's own distribution there (Hydra 6.1, Amphista eq. 7).
    label_weight: float = 1.0
    teacher_weight: float = 0.0
    # To it comes feature_weight x smooth L1 between what the head's logits are read from and the
    # hidden state that the backbone has there (EAGLE); for heads that share the LM head.
    feature_weight: float = 0.0
    # EAGLE: the loss is over this number of first levels. 1 for EAGLE-1 as released, 7 for EAGLE-3; from
    # the second on a level reads the outputs of the one before, as in decoding (training-time test).
    levels: int = 1
    # Noise on the hidden states that heads train on: uniform(-1, 1) x this / sqrt(L d).
    hidden_noise: float = 0.0
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 500
    keep_checkpoints: int = 2
    # Draw curves.png at every evaluation (needs matplotlib).
    curves: bool = True
    # Project to log to with Weights & Biases, if it is installed; empty = off.
    wandb: str = ""
    max_bad_steps: int = 10
    seed: int = 0


@dataclass
class Config:
    """One training run, whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    # Devices along (data, fsdp, tensor); -1 = all that are left.
    mesh: tuple[int, int, int] = (1, -1, 1)
    workdir: str = ""
    # Print sizes and counted memory, compile the real step from shapes alone, train nothing;
    # "counted": stop before the compilation, which takes minutes for large models.
    dry_run: Literal[False, True, "counted"] = False
