"""A publisher's defaults for texts: generation_config.json, with the meaning that transformers gives each field."""

import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from medusa_jax.console import inform
from medusa_jax.files.hub import resolve
from medusa_jax.files.json_files import optional_json
from medusa_jax.whole_files import Json

# Files with the defaults; as in transformers, the second counts only without the first.
FILES = ("generation_config.json", "config.json")
# Fields of sampled text, which a conversation follows.
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Fields that would change a text and are not applied here, with the value that changes nothing; null and empty values
# change nothing, too. Lengths are left out: the caller sets them. `gguf/convert.py` names the fields of GGUF files.
NEUTRAL: dict[Any, str] = {
    None: "bad_words_ids begin_suppress_tokens constraints dola_layers exponential_decay_length_penalty "
    "force_words_ids forced_bos_token_id forced_eos_token_id max_time sequence_bias stop_strings "
    "suppress_tokens watermarking_config general.sampling.sequence",
    0: "encoder_no_repeat_ngram_size min_length min_new_tokens penalty_alpha remove_invalid_values "
    "token_healing general.sampling.mirostat general.sampling.xtc_probability",
    1: "encoder_repetition_penalty guidance_scale num_beams",
    -1: "general.sampling.penalty_last_n",
}
UNAPPLIED = {name: value for value, names in NEUTRAL.items() for name in names.split()}
# The same for fields that only sampled text depends on.
UNAPPLIED_SAMPLING = {"typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}


@dataclass(frozen=True)
class TextDefaults:
    """A publisher's defaults.

    Attributes:
      no_repeat_ngram_size: of all texts, not checked.
      repetition_penalty: of all texts.
      sampling: of conversations; {}: greedy.
      unapplied: other fields that would change a text, with their values.
    """

    no_repeat_ngram_size: Any = 0
    repetition_penalty: float = 1.0
    sampling: Json = field(default_factory=dict)
    unapplied: tuple[str, ...] = ()


def generation_config(path: str) -> Json:
    """The generation_config.json of a model directory or hub id, else its config.json; {} without both."""
    directory = resolve(path, list(FILES))
    files = [os.path.join(directory, name) for name in FILES]
    return optional_json(files[0] if os.path.isfile(files[0]) else files[1])


def text_defaults(path: str) -> TextDefaults:
    """The defaults of a model directory or hub id."""
    config = generation_config(path)
    is_sampled = config.get("do_sample") is True
    neutral = UNAPPLIED | (UNAPPLIED_SAMPLING if is_sampled else {})
    penalty = config.get("repetition_penalty")
    penalty = 1.0 if penalty is None else penalty
    if type(penalty) not in (int, float) or not 1e-30 <= penalty <= 1e30:
        neutral, penalty = neutral | {"repetition_penalty": None}, 1.0
    unapplied = [
        f"{name} {config[name]!r:.40}"
        for name, value in neutral.items()
        if config.get(name) not in (None, [], {}, "", value)
    ]
    numbers = {k: config[k] for k in SAMPLING if type(config.get(k)) in (int, float)}
    return TextDefaults(
        config.get("no_repeat_ngram_size") or 0,
        float(penalty),
        {"temperature": 1.0} | numbers if is_sampled else {},
        tuple(unapplied),
    )


@lru_cache
def name_unapplied(directory: str, fields: tuple[str, ...]) -> None:
    """Tell the user once about the fields that are not applied."""
    if fields:
        inform(f"{directory}: its publisher's {', '.join(fields)} is not applied here")
