"""Train a backbone or draft heads.

    python train.py --config=configs/own.py --config.model.path=path/to/model --config.data.source=talk.jsonl
    python train.py --config=configs/vicuna7b_m1.py --workdir=runs/vicuna7b_m1 --config.optim.lr=3e-3
    python train.py --config=configs/vicuna7b_m1.py --config.dry_run

Started again with the same workdir, it resumes.
"""

import sys

from medusa_jax.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
