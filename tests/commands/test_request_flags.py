"""Flags of decode.py and fields of a file of requests: which options they become."""

import io
import json
import sys

import pytest

from medusa_jax import Options
from medusa_jax.commands.decode import main
from medusa_jax.commands.requests import read_requests, read_stdin, shared_options
from medusa_jax.commands.turn_input import TurnInput


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("", {}),
        ("--constraint json_object", {"constraint": {"json_object": True}}),
        ("--constraint regex:a:b|c", {"constraint": {"regex": "a:b|c"}}),
        ("--constraint choice:yes|no", {"constraint": {"choice": ["yes", "no"]}}),
        ("--logit_bias 15=-100,7=2.5", {"logit_bias": {7: 2.5, 15: -100}}),
        ("--presence_penalty 0.5", {"presence_penalty": 0.5}),
        ("--frequency_penalty -1", {"frequency_penalty": -1.0}),
        ("--repetition_penalty 1.2", {"repetition_penalty": 1.2}),
        ("--max_steps 3 --logprobs 2", {"max_steps": 3, "logprobs": 2}),
        ("--stop a --stop b", {"stop": ("a", "b")}),
        ("--stop_sequence 4,5 --stop_sequence 0,0", {"stop_sequences": ((4, 5), (0, 0))}),
        ("--eos_ids 3", {"eos_ids": (3,)}),
        ("--eos_ids none", {"eos_ids": ()}),
    ],
)
def test_flags(flags, options):
    parsed = main.parse(["--prompt", "a", *flags.split()])
    assert shared_options(parsed) == Options(**options)


def test_constraints_from_files(tmp_path):
    for kind, text in (("json_schema", '{"type": "null"}'), ("grammar", 'start: "a"')):
        (tmp_path / "file").write_text(text)
        flags = ["--prompt", "a", "--constraint", f"{kind}:{tmp_path}/file"]
        found = shared_options(main.parse(flags))
        assert found == Options(constraint={kind: text})


def test_standard_input_without_its_byte_order_mark(monkeypatch):
    for read in (read_stdin, lambda: TurnInput().read()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffgrüße"))
        assert read() == "grüße"


def test_lines_of_a_file(tmp_path):
    """Each line's fields; those of the flags where it has none."""
    file = tmp_path / "requests.jsonl"
    own = {"constraint": {"choice": ["a"]}, "logit_bias": {"3": 1}, "presence_penalty": 1}
    own |= {"eos_ids": [5], "stop_sequences": [[4, 6], [0]], "logprobs": 2, "max_steps": 3}
    file.write_text(json.dumps({"prompt": "x"} | own) + '\n{"prompt": "y"}\n')
    flags = main.parse(["--prompts_file", str(file), "--constraint", "regex:b"])
    _, [first, second] = read_requests(flags)
    own |= {"logit_bias": {3: 1.0}, "eos_ids": (5,), "stop_sequences": ((4, 6), (0,))}
    assert first == Options(**own)
    assert second == Options(constraint={"regex": "b"})
