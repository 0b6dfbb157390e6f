"""Turns of training data: their roles and fields, and why some are skipped."""

import pytest

from medusa_jax.training.data.sources import parse_turns


def share(*turns):
    return [{"from": who, "value": text} for who, text in turns]


def test_parse_turns():
    good = share(("gpt", "cut off"), ("human", "a"), ("gpt", "b"), ("human", "c"))
    assert parse_turns(good) == (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "",
    )
    system = share(("system", "s"), ("user", "a"), ("chatgpt", "b"))
    assert [m["role"] for m in parse_turns(system)[0]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], "no answered user turn"),
        (["x"], "unknown role None"),
        (share(("human", "a")), "no answered user turn"),
        (share(("human", "a"), ("tool", "b")), "unknown role 'tool'"),
        (share(("human", "a"), ("human", "b"), ("gpt", "c")), "roles do not alternate"),
        (share(("human", "a"), ("gpt", " ")), "an empty assistant turn"),
        (share(("human", "a"), ("gpt", 3)), "a turn without 'value'"),
        (share(("human", "a"), ("system", "s"), ("gpt", "c")), "roles do not alternate"),
    ],
)
def test_parse_turns_says_why_not(record, reason):
    assert parse_turns(record) == ([], reason)


@pytest.mark.parametrize(
    ("user", "assistant"),
    [("user", "assistant"), ("User", " MODEL "), ("human", "gpt"), ("prompter", "bot")],
)
def test_turns_of_other_roles_and_fields(user, assistant):
    """Fields that a table fills with None do not count as given."""
    turns = [
        {"role": "developer", "content": "s"},
        {"role": user, "value": [{"type": "text", "text": "a"}], "content": None},
        {"from": assistant, "content": "b", "role": None, "reasoning_content": "t"},
    ]
    roles = ["system", "user", "assistant"]
    want = [{"role": role, "content": text} for role, text in zip(roles, "sab")]
    want[2]["reasoning_content"] = "t"
    assert parse_turns(turns) == (want, "")
    assert parse_turns([{"role": "user", "content": [1]}])[1]
