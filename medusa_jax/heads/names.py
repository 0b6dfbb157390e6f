"""The names of all drafters. Imports nothing, so that `--help` can show them at once."""

# Name and file of every drafter. `DRAFTERS` have heads, which are trained and stored; `BASELINES` have
# none.
DRAFTERS = {
    "amphista": "amphista",
    "amphista_alpha": "amphista",
    "dflash": "dflash",
    "dspark": "dflash",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "hydra": "hydra",
    "hydrapp": "hydrapp",
    "medusa": "medusa",
}
BASELINES = {
    "draft_model": "draft_model",
    "lookahead": "lookahead",
    "prompt_lookup": "prompt_lookup",
}
