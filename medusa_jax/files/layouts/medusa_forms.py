"""How files of Medusa heads name their tensors: keys of their authors and of vLLM."""

import dataclasses
import re

from medusa_jax.arch import HeadsConfig
from medusa_jax.files.layouts.layout import Export
from medusa_jax.files.layouts.stored_heads import Arrays
from medusa_jax.files.tensor import Tensors
from medusa_jax.whole_files import Json

_PREFIX = r"(?:base_model\.model\.)?(?:model\.)?medusa_head\."
MEDUSA = re.compile(
    # PEFT keeps its wrapper's names when a whole model is saved instead of its adapter.
    rf"({_PREFIX}|)(\d+)\.(modules_to_save\.\w+\.|)(\d+)\.(linear\.(?:weight|bias)|weight)"
)
VLLM = re.compile(
    r"(medusa_heads\.|)(?:blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)|lm_heads\.(\d+)\.weight)"
)


@dataclasses.dataclass(frozen=True)
class Form:
    """How a file names its tensors, and the sizes that its keys show.

    Attributes:
      block, lm_head: keys with {k}, {j}, {leaf}; no `lm_head` if heads score by the backbone's.
      tied: all layers share the weights of the first, which may be the only one in the file.
    """

    block: str
    lm_head: str
    n_heads: int
    n_layers: int
    tied: bool = False

    def locate(self, path: str) -> tuple[str, bool]:
        """A path of `heads/medusa.py` -> (key, whether it is stored transposed)."""
        match = re.fullmatch(r"heads_(\d+)/(?:layers_(\d+)|lm_head)/(kernel|bias)", path)
        assert match is not None, path
        k, j, leaf = match.groups()
        if j is None:
            return self.lm_head.format(k=k), True
        leaf = {"kernel": "weight"}.get(leaf, leaf)
        layer = 0 if self.tied else j
        return self.block.format(k=k, j=layer, leaf=leaf), leaf == "weight"

    @property
    def lm_heads(self) -> tuple[str, ...]:
        """The keys of all LM heads."""
        return tuple(dict.fromkeys(self.lm_head.format(k=k) for k in range(self.n_heads)))

    def heads(self, draft_vocab: int = 0) -> HeadsConfig:
        return HeadsConfig(
            n_heads=self.n_heads,
            n_layers=self.n_layers,
            lm_head="own" if self.lm_head else "shared",
            draft_vocab=draft_vocab,
        )

    def arrays(self, export: Export) -> Arrays:
        """The tensors of a file: all layers, then the LM heads."""
        heads, layers = range(self.n_heads), range(self.n_layers)
        leaves = ("kernel", "bias")
        paths = [f"heads_{k}/layers_{j}/{x}" for k in heads for j in layers for x in leaves]
        if self.lm_head:
            paths += [f"heads_{k}/lm_head/kernel" for k in heads]
        return export.arrays(self.locate, {path: export.whole[path] for path in paths})


def authors_form(n_heads: int, n_layers: int, stem: str = "{k}.") -> Form:
    """The form of Medusa's authors, `stem` in front of the number of a layer."""
    block, lm_head = f"{stem}{{j}}.linear.{{leaf}}", f"{stem}{n_layers}.weight"
    return Form(block, lm_head, n_heads, n_layers)


def vllm_form(n_heads: int, n_layers: int, one: bool, prefix: str = "") -> Form:
    """vLLM's form, with `one` LM head for all, the backbone's or a copy of it."""
    block = f"{prefix}blocks.{{k}}.layers.{{j}}.{{leaf}}"
    lm_head = f"{prefix}lm_heads.{'0' if one else '{k}'}.weight"
    return Form(block, lm_head, n_heads, n_layers)


def authors_form_of(tensors: Tensors, config: Json) -> tuple[Form, str]:
    """The form of a file under the authors' keys, and the prefix of its keys."""
    matches = [match for key in tensors if (match := MEDUSA.fullmatch(key))]
    prefix, _, infix, *_ = matches[0].groups()
    first_head = [(int(m[4]), m[5]) for m in matches if m[2] == "0"]
    lm_heads = [j for j, leaf in first_head if leaf == "weight"]
    layers = {j for j, leaf in first_head if leaf != "weight"}
    n_layers = lm_heads[0] if lm_heads else max(layers, default=-1) + 1
    count = config.get("medusa_num_layers")
    tied = layers == {0} and n_layers > 1 and count == n_layers
    n_heads = max(int(m[2]) for m in matches) + 1
    form = authors_form(n_heads, n_layers, f"{prefix}{{k}}.{infix}")
    lm_head = form.lm_head if lm_heads else ""
    return dataclasses.replace(form, lm_head=lm_head, tied=tied), prefix


def vllm_form_of(tensors: Tensors, config: Json) -> Form:
    """The form of a file under vLLM's keys."""
    matches = [match for key in tensors if (match := VLLM.fullmatch(key))]
    n_layers = max((int(m[3]) for m in matches if m[2]), default=-1) + 1
    n_heads = max(int(m[2] or m[4]) for m in matches) + 1
    one = bool(config.get("original_lm_head"))
    return vllm_form(n_heads, n_layers, one, matches[0][1])


def is_head_key(key: str) -> bool:
    """Whether a key of a full model or an adapter belongs to its Medusa heads."""
    return re.match(_PREFIX, key) is not None
