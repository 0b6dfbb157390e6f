"""Medusa heads for the demo: 4 heads of two residual blocks that share the backbone's LM head.

    python train.py --config=configs/demo_medusa.py --workdir=work/demo/medusa
    python decode.py --drafter work/demo/medusa/export --prompt "import os" --compare

On the bundled backbone and source code of the Python that runs it, so it needs nothing else; a few minutes
on two CPU cores. The bundled heads learned from the backbone's own continuations, which is better
(`python -m research demo_build`; counted.npy marks what it wrote itself):

    python train.py --config=configs/demo_medusa.py --workdir=work/demo/medusa \\
        --config.model.path=work/demo/native/export --config.data.source=work/demo/answers \\
        --config.data.eval_source=work/demo/heldout --config.train.steps=1200
"""

import sysconfig
from pathlib import Path

import medusa_jax
from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)

# Parts of the standard library that every installation has; the last one is held out.
TRAIN = ("asyncio", "concurrent", "email", "html", "http", "importlib", "logging",
         "multiprocessing", "xml")  # fmt: skip
HELD_OUT = "urllib"


def get_config() -> Config:
    """Medusa-1 (frozen backbone) on source code."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return Config(
        model=ModelConfig(path=str(Path(medusa_jax.__file__).parent / "demo" / "backbone")),
        heads=HeadsConfig(drafter="medusa", n_heads=4, n_layers=2, lm_head="shared"),
        data=DataConfig(
            source=",".join(str(library / name) for name in TRAIN),
            eval_source=str(library / HELD_OUT),
            eval_samples=128,
            # Of the backbone's continuations two (a prompt and its 200 tokens) to a row.
            seq_len=640,
            packing="first_fit",
            # The backbone is frozen: its hidden states are computed once (0.7 GB).
            cache_features="float32",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=40, schedule="cosine", clip_norm=1.0),
        train=TrainConfig(
            stage="medusa1",
            batch_size=4,
            steps=400,
            dtype="bfloat16",
            remat=False,
            # Two answers of at most 200 tokens per row: their 400 columns are five chunks.
            loss_chunk=80,
            log_every=10,
            eval_every=100,
            save_every=100,
        ),
        mesh=(1, 1, 1),
    )
