"""Draft heads for a model of yours, from its text.

    python train.py --config=configs/own.py --config.model.path=M --config.data.source=D --workdir=runs/own

M is a directory in Hugging Face form, a .gguf file, a hub id or a name; D is JSON lines, best of the
model's own text (`medusa distill` writes it). `--config.heads.drafter` chooses the family:
medusa (the default), hydra, hydrapp, amphista, amphista_alpha, eagle, eagle3, dflash or dspark. Sizes follow
from the model, the amount of text and the device, and every field can be set, such as `--config.train.steps=1000`. A
twentieth of the samples is held out. On a CPU the defaults are a trial of minutes for a model below a billion
parameters.
"""

from medusa_jax.training.own_recipe import complete as complete
from medusa_jax.training.own_recipe import get_config as get_config
