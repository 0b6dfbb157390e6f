"""Medusa-1 heads for Vicuna-7B: five heads on a frozen backbone (Medusa 2.2.1 and 3.1).

    python train.py --config=configs/vicuna7b_m1.py --workdir=runs/vicuna7b_m1
    python train.py --config=configs/vicuna7b_m1.py --config.dry_run      (shapes and memory only)

Two epochs of ShareGPT, batch 64, learning rate 2e-3 (four times the backbone's 5e-4 of the two-stage
recipe), cosine with 40 warm-up steps. It fits one 80 GB GPU; `--config.mesh=1,-1,1` (the default)
spreads parameters and rows over all devices. The paper uses a 4-bit backbone and an 8-bit optimizer:
`--config.model.quantise=nf4 --config.optim.name=adamw8bit`; Medusa-2 (vicuna7b_m2.py) continues from
there.

What to expect: the paper reports a 2.18x speed-up of Medusa-1 on MT-bench. The published heads of this
model (v1.3) have a top-1 accuracy of .56 .32 .20 .15 .12 for the tokens 2, 3, 4, 5 and 6 ahead; `top1`
in log.jsonl is the same measure.
"""

from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)


def get_config() -> Config:
    """The recipe; `model.arch` is only for the dry run, training reads the model's."""
    return Config(
        model=ModelConfig(
            path="lmsys/vicuna-7b-v1.5",
            param_dtype="bfloat16",
            arch=LlamaConfig(),  # the defaults are Vicuna-7B v1.5
        ),
        heads=HeadsConfig(drafter="medusa", n_heads=5, n_layers=1, lm_head="own"),
        data=DataConfig(
            source="Aeala/ShareGPT_Vicuna_unfiltered",
            split="train",
            format="sharegpt",
            seq_len=2048,
            packing="first_fit",
            chat_template="vicuna",
        ),
        optim=OptimConfig(name="adamw", lr=2e-3, warmup_steps=40, schedule="cosine"),
        train=TrainConfig(
            stage="medusa1",
            batch_size=64,
            accumulation=8,
            epochs=2,
            dtype="bfloat16",
            remat=False,
            loss_chunk=256,
            lambda_decay=0.8,
            log_every=5,
            save_every=200,
        ),
        mesh=(1, -1, 1),
    )
