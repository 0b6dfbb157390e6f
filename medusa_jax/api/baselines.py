"""Drafters that need no heads on disk, as `--drafter` names them.

prompt_lookup                      optionally with a field: prompt_lookup:tokens=4
module:Class                       a drafter without heads from another package, optionally with fields
draft_model:PATH                   any smaller model with the same tokenizer
draft_model                        the bundled one, as with the demo
"""

import dataclasses
from dataclasses import dataclass

from jax.sharding import Mesh

from medusa_jax.api.form import Form, read_backbone
from medusa_jax.arch import HeadsConfig
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hub import resolve
from medusa_jax.heads.draft_model import MODEL, DraftModelConfig
from medusa_jax.heads.names import split_drafter
from medusa_jax.heads.registry import drafter_class, is_baseline
from medusa_jax.sharding import Params
from medusa_jax.text.tokenizer import NoTokenizer, Tokenizer, has_tokenizer, load_tokenizer
from medusa_jax.whole_files import Json

# Two tokenizers that give this text the same ids are considered equal.
PROBE = "def f(x):\n    return 'The 17 naïve foxes' + x  # [[0.5, -1]]\n"


@dataclass(frozen=True)
class Baseline:
    """A requested drafter without heads.

    Attributes:
      config: its configuration; reading a draft model fills in the model's shape.
      path: path of the draft model, "" for others.
    """

    config: HeadsConfig
    path: str = ""


def find_baseline(drafter: str, draft_model: str) -> Baseline | None:
    """The baseline that `drafter` names, None if it names heads.

    Args:
      draft_model: directory of the draft model that comes with the model, or "".

    Raises:
      UserError: unknown fields, or no path of a draft model.
    """
    name, argument = split_drafter(drafter)
    if not is_baseline(name):
        return None
    if name == DraftModelConfig.drafter:
        path = argument or draft_model
        if not path:
            raise UserError(
                "give the draft model's directory, name or hub id: --drafter draft_model:PATH"
            )
        return Baseline(DraftModelConfig(), path)
    kind = drafter_class(name).Config
    base_fields = {f.name for f in dataclasses.fields(HeadsConfig)}
    names = {f.name for f in dataclasses.fields(kind)} - base_fields
    fields: Json = {}
    for part in argument.split(":") if argument else ():
        field, _, value = part.partition("=")
        if field not in names or not value.isdecimal():
            raise UserError(
                f"--drafter {drafter}: write {name}:field=number with the fields "
                f"{', '.join(sorted(names))}, not {part!r}"
                f"{'' if field in names else did_you_mean(field, names)}"
            )
        if field in fields:
            raise UserError(f"--drafter {drafter}: {field} is given twice")
        fields[field] = int(value)
    return Baseline(kind(**fields | {"drafter": name}))


def load_baseline(
    baseline: Baseline, tokenizer: Tokenizer, form: Form, mesh: Mesh
) -> tuple[HeadsConfig, Params]:
    """Return its configuration, and its parameters in decoding form ({} if it has none).

    Args:
      tokenizer: the backbone's; a draft model's tokenizer, if both exist, must agree with it.
      form: of the draft model's weights, as of the backbone's.

    Raises:
      UserError: a draft model that cannot be read or has another tokenizer.
    """
    if not baseline.path:
        return baseline.config, {}
    directory = resolve(baseline.path)
    compare = has_tokenizer(directory) and not isinstance(tokenizer, NoTokenizer)
    if compare and load_tokenizer(directory).encode(PROBE) != tokenizer.encode(PROBE):
        raise UserError(
            f"the draft model {baseline.path} has another tokenizer than the model: its tokens "
            "would mean something else"
        )
    base = BaseFiles.open(directory)
    config = dataclasses.replace(baseline.config, arch=base.config)  # type: ignore[call-arg]
    return config, {MODEL: read_backbone(base, form, mesh)}
