"""A publisher's generation_config.json: what is applied, and what is named because it is not."""

import json

import pytest
import transformers
from gguf_files import write

from medusa_jax.files.gguf.convert import sampling_of
from medusa_jax.files.gguf.reader import read_gguf
from medusa_jax.files.text_defaults import (
    UNAPPLIED,
    UNAPPLIED_SAMPLING,
    TextDefaults,
    name_unapplied,
    text_defaults,
)

NEUTRAL = transformers.GenerationConfig._get_default_generation_params()


def test_the_fields_are_those_of_transformers(tmp_path):
    """Its defaults are neutral, alone and beside lengths; any other value of a field is named."""
    names = [n for n in UNAPPLIED | UNAPPLIED_SAMPLING if not n.startswith("general.")]
    known = transformers.GenerationConfig().to_dict() | NEUTRAL
    assert set(names) - known.keys() == {"constraints", "dola_layers", "force_words_ids",
                                         "penalty_alpha", "token_healing", "top_h"} - known.keys()  # fmt: skip
    file = tmp_path / "generation_config.json"
    for is_sampled in (True, False):
        file.write_text(json.dumps(NEUTRAL | {"do_sample": is_sampled, "max_length": 9}))
        assert text_defaults(str(tmp_path)).unapplied == ()
        for name in names:
            file.write_text(json.dumps({"do_sample": is_sampled, name: 0.5}))
            named = (f"{name} 0.5",) if is_sampled or name in UNAPPLIED else ()
            assert text_defaults(str(tmp_path)).unapplied == named


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, TextDefaults()),
        ({"repetition_penalty": 1.1, "no_repeat_ngram_size": None, "temperature": 0.7},
         TextDefaults(repetition_penalty=1.1)),
        ({"repetition_penalty": 2, "do_sample": True, "top_k": 20, "max_new_tokens": 5},
         TextDefaults(repetition_penalty=2.0, sampling={"temperature": 1.0, "top_k": 20})),
        ({"repetition_penalty": "hot", "forced_eos_token_id": 2, "num_beams": 1},
         TextDefaults(unapplied=("forced_eos_token_id 2", "repetition_penalty 'hot'"))),
        ({"repetition_penalty": 0}, TextDefaults(unapplied=("repetition_penalty 0",))),
    ],
)  # fmt: skip
def test_what_is_read(config, expected, tmp_path):
    """From generation_config.json, else from config.json."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert text_defaults(str(tmp_path)) == expected
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"repetition_penalty": 9.0}')
    assert text_defaults(str(tmp_path)) == expected


def test_it_is_named_once(capsys):
    for _ in range(2):
        name_unapplied("/m", ("forced_eos_token_id 2", "num_beams 4"))
        name_unapplied("/n", ())
    line = "/m: its publisher's forced_eos_token_id 2, num_beams 4 is not applied here\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"temp": 0.5, "top_k": 40, "mirostat": 0},
         {"do_sample": True, "temperature": 0.5, "top_k": 40, "general.sampling.mirostat": 0}),
        ({"penalty_repeat": 1.5}, {"repetition_penalty": 1.5}),
        ({"penalty_repeat": 1.5, "penalty_last_n": 0}, {}),
        ({"penalty_repeat": 1.0, "penalty_last_n": 64}, {"repetition_penalty": 1.0}),
        ({"suppress_tokens": [5, 7]}, {"suppress_tokens": [5, 7]}),  # of every text there
    ],
)  # fmt: skip
def test_the_metadata_of_llama_cpp(metadata, expected, tmp_path):
    """A window of 0 turns its penalty off; one of 64 tokens is not ours."""
    prefix = {"suppress_tokens": "tokenizer.ggml."}
    values = {prefix.get(key, "general.sampling.") + key: x for key, x in metadata.items()}
    assert sampling_of(read_gguf(write(tmp_path / "m.gguf", values, {}))) == expected
