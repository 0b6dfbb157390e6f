"""Check a configuration before a run; errors are one line each."""

from medusa_jax import typed
from medusa_jax.config import Config, fields_of
from medusa_jax.errors import UserError
from medusa_jax.files.hf_config import contradiction
from medusa_jax.training.partition import trained_groups


def check(cfg: Config) -> None:
    """Refuse unknown choices and inconsistent fields before anything is read.

    Raises:
      UserError: names the fields.
    """
    for path, owner, name in fields_of(cfg):
        typed.field_value(owner, name, getattr(owner, name), path)
    for is_wrong, problem in _contradictions(cfg):
        if is_wrong:
            raise UserError(problem)


def _contradictions(cfg: Config) -> list[tuple[bool, str]]:
    """(whether the configuration contradicts itself in this way, how to say so)."""
    t, model, data = cfg.train, cfg.model, cfg.data
    trained, kl = trained_groups(t.stage, cfg.lora.rank), t.backbone_loss == "kl"
    weights = {name: x for name, x in vars(t).items() if name.endswith("_weight")}
    shape = contradiction(model.arch)
    needed = [t.lambda_decay, any(weights.values()), len(trained) == 1 or t.lambda_0]
    has_teacher = model.path or cfg.lora.rank or cfg.dry_run
    return [
        (bool(shape), f"model.arch: {shape}"),
        (
            bool(model.quantise) and "backbone" in trained,
            f"stage {t.stage} trains the backbone itself, which model.quantise {model.quantise!r} "
            "forbids: use adapters (lora.rank) or train only heads",
        ),
        (
            kl and trained == ("heads",),
            "train.backbone_loss is kl, but medusa1 trains no backbone",
        ),
        (
            bool(model.add_layers) and trained == ("heads",),
            f"model.add_layers needs a stage that trains the backbone, which {t.stage} does not",
        ),
        (model.add_layers > 0 and not model.path, "model.add_layers needs a model.path"),
        (kl and not has_teacher, "train.backbone_loss kl needs a backbone: set model.path"),
        (
            bool(data.cache_features)
            and (t.stage, data.packing) != ("medusa1", "first_fit"),
            "data.cache_features needs a backbone and rows that do not change: train.stage medusa1 and "
            "data.packing first_fit",
        ),
        (
            bool(data.kept_share) and data.packing != "first_fit",
            "data.held_out keeps whole samples: it needs data.packing first_fit",
        ),
        (
            bool(data.draft_vocab_from) and not cfg.heads.draft_vocab,
            "data.draft_vocab_from is set, but heads.draft_vocab is 0: heads score all tokens",
        ),
        (
            bool(t.feature_weight) and cfg.heads.lm_head != "shared",
            "train.feature_weight compares features with the inputs of the model's LM head: it needs "
            f"heads.lm_head shared, not {cfg.heads.lm_head!r}",
        ),
        (
            bool(t.heads_path) and "heads" not in trained,
            f"train.heads_path is set, but stage {t.stage} has no heads",
        ),
        (
            "heads" in trained and not all(needed),
            f"the heads' loss is 0: set train.lambda_decay, lambda_0 and one of {', '.join(weights)}",
        ),
        ("lora" in trained and not cfg.lora.alpha, "lora.alpha is 0: adapters do nothing"),
    ]
