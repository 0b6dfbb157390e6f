"""--constraint, --logit_bias and the penalties of decode.py, and the same in a file of requests."""

import json

import pytest

from medusa_jax import Options, UserError
from medusa_jax.commands.decode import main, parser
from medusa_jax.commands.requests import read_requests, shared_options


def asked(*flags):
    return Options(**shared_options(parser().parse_args(["--prompt", "a", *flags])))


def test_flags(tmp_path):
    schema, grammar = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"type": "null"}')
    grammar.write_text('start: "a"')
    assert asked() == Options()
    for flag, given in (
        (f"json_schema:{schema}", {"json_schema": {"type": "null"}}),
        (f"grammar:{grammar}", {"grammar": 'start: "a"'}),
        ("json_object", {"json_object": True}),
        ("regex:a:b|c", {"regex": "a:b|c"}),
        ("choice:yes|no", {"choice": ["yes", "no"]}),
    ):
        assert asked("--constraint", flag) == Options(constraint=given)
    flags = ["--logit_bias", "15=-100,7=2.5", "--presence_penalty", "0.5"]
    flags += ["--frequency_penalty", "-1", "--repetition_penalty", "1.2"]
    assert asked(*flags) == Options(
        logit_bias={7: 2.5, 15: -100},
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        repetition_penalty=1.2,
    )


def test_lines_of_a_file(tmp_path):
    file = tmp_path / "requests.jsonl"
    own = {"constraint": {"choice": ["a"]}, "logit_bias": {"3": 1}, "presence_penalty": 1}
    file.write_text(json.dumps({"prompt": "x"} | own) + '\n{"prompt": "y"}\n')
    flags = parser().parse_args(["--prompts_file", str(file), "--constraint", "regex:b"])
    _, [first, second] = read_requests(flags)
    assert first == Options(
        constraint={"choice": ["a"]}, logit_bias={3: 1.0}, presence_penalty=1
    )
    assert second == Options(constraint={"regex": "b"})
    file.write_text('{"prompt": "x", "constraint": {"regx": "a"}}')
    with pytest.raises(UserError, match=r"line 1: .* did you mean 'regex'"):
        read_requests(parser().parse_args(["--prompts_file", str(file)]))
    file.write_text('{"prompt": "x", "logit_bias": [3]}')
    with pytest.raises(UserError, match="line 1: 'logit_bias' must be numbers"):
        read_requests(parser().parse_args(["--prompts_file", str(file)]))


@pytest.mark.parametrize(
    ("flags", "about"),
    [
        (["--constraint", "regex:a", "--no_repeat_ngram_size", "3"], "give one of them"),
        (["--constraint", "json_schema:/nowhere.json"], "cannot read"),
        (["--constraint", "regx:a"], "did you mean 'regex'"),
        (["--constraint", "choice:"], "choice should be"),
        (["--logit_bias", "a=1"], "--logit_bias is a list like"),
        (["--logit_bias", "1=nan"], "finite numbers"),
        (["--repetition_penalty", "0"], "above 0"),
        (["--presence_penalty", "inf"], "presence_penalty must be a number"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, flags, about):
    assert main(["--prompt", "a", *flags]) == 2
    said = capsys.readouterr().err
    assert about in said and said.count("\n") == 1
