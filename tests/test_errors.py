"""Unknown names come with the nearest known one, wherever they are given."""

import pytest

from medusa_jax import UserError, load
from medusa_jax.api.baselines import find_baseline
from medusa_jax.api.finding import find_heads
from medusa_jax.devices.chips import find_chip
from medusa_jax.errors import did_you_mean
from medusa_jax.tree.files import parse_tree


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: load("smolm2"), "smollm2"),
        (lambda: load(drafter="medsua"), "medusa"),
        (lambda: load(drafter="lookahed:window=7"), "lookahead"),
        (lambda: load(dtype="flaot32"), "float32"),
        (lambda: load(weights="bflota16"), "bfloat16"),
        (lambda: find_heads(None, "Hydra"), "hydra"),
        (lambda: find_baseline("lookahead:widnow=7"), "window"),
        (lambda: parse_tree("auot"), "auto"),
        (lambda: parse_tree("chian:3"), "chain"),
        (lambda: find_chip("tpuv5p"), "tpu-v5p"),
    ],
)
def test_the_nearest_name_is_named(call, name):
    with pytest.raises(UserError) as error:
        call()
    said = str(error.value)
    assert f"did you mean {name}?" in said.replace("'", "") and "\n" not in said


def test_spelling_like_that_of_other_shells_and_languages():
    known = ("max_new_tokens", "top_p")
    assert did_you_mean("Max-New-Tokens", known) == "; did you mean 'max_new_tokens'?"
    assert did_you_mean("zzz", known) == ""
