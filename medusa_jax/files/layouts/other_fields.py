"""Fields of a published config.json that are not read: which of them may change what the heads compute."""

import re
from collections.abc import Set

from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json

# What has no tensors. Anything else that heads compute shows in the keys of their weights, which are all read.
_COMPUTED = re.compile(
    r"norm|scal|multipl|softcap|window|swa|rope|rotary|alibi|neox|residual|causal|mask|shift|offset|"
    r"activation|clip|swiglu|sink|logit|attention_chunk|parallel_draft"
)
# Read by `hf_config.parse_config`.
_LAYER = {
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
    "max_window_layers",
}  # fmt: skip
# Of training, of experts (which have tensors), or of another part of the model.
_ELSEWHERE = re.compile(
    r"loss|dropout|train|init|router|routed|expert|moe|topk|vision|audio|image"
)
_FACTOR = re.compile(r"scal|multipl")


def check_others(file: str, fields: Json, known: Set[str]) -> None:
    """Refuse a field that may change the computation, unless its value means "off" or "times one".

    Args:
      known: the fields that the caller reads or expects.

    Raises:
      UserError: names the field.
    """
    for name in sorted(fields.keys() - known - _LAYER):
        value = fields[name]
        one = value == 1 and value is not True and _FACTOR.search(name)
        computed = _COMPUTED.search(name) and not _ELSEWHERE.search(name)
        if value and not one and computed:
            raise UserError(
                f"{file}: {name} {value!r:.80} is not supported: it may change what the heads compute"
            )
