"""What a request may ask of its text, and that what cannot be is one sentence, after bounded work."""

import contextlib
import json
import re
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from cases import thinned
from refusals import refused
from tiny import PRINTABLE, write_tokenizer

from medusa_jax import Options, UserError
from medusa_jax.constraints import Constraint, Grammars, constraint_of
from medusa_jax.constraints.grammars import KEPT, LIMITS
from medusa_jax.text.tokenizer import load_tokenizer


def made_for(path, more=0, **options):
    """Grammars of a tiny tokenizer, for a model with more tokens than it; the tokenizer."""
    size = write_tokenizer(path, **options)
    tokenizer = load_tokenizer(str(path))
    return Grammars(tokenizer, size + more), tokenizer


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    return made_for(tmp_path_factory.mktemp("tokenizer"), more=30)


@pytest.fixture(scope="module")
def printable(tmp_path_factory):
    """A vocabulary that can write JSON."""
    return made_for(tmp_path_factory.mktemp("printable"), characters=PRINTABLE)


def allowed(guide, tokenizer):
    """The tokens that may come next, as texts."""
    bits = guide.first_W.copy()
    guide.fill(bits)
    ids = [i for i in range(32 * len(bits)) if bits[i >> 5] >> (i & 31) & 1]
    return sorted(tokenizer.decode([i], skip_special=False) for i in ids)


def test_forbidden_drafts_are_replaced(grammars):
    """By the forced token, by the best guess that is allowed, or not at all."""
    pytest.importorskip("llguidance")
    made, tokenizer = grammars
    guide = made.guide(constraint_of({"choice": ["abc", "axx", "ayin"]}), [2])
    a, b, x, y = (tokenizer.encode(t)[-1] for t in "abxy")
    abc, inside, end = tokenizer.encode("abc")[-1], tokenizer.encode("in")[0], 2
    guide.advance([a])
    # The root's children: allowed, forbidden twice; then a chain after the first of them.
    children = [[1, 2, 3], [4], [], [], [5], [6], []]
    nodes = np.array([a, x, abc, 1, b, b, b])
    guesses = np.full((7, 2), -1)
    guesses[0] = x, y
    into = np.zeros((7, len(guide.first_W)), np.uint32)
    assert guide.fill(into[0])
    guide.fill_tree(nodes, children, guesses, into)
    assert nodes.tolist() == [a, x, y, 1, x, end, b]
    # Nothing of the text has changed.
    assert allowed(guide, tokenizer) == ["b", "x", "y"]
    nodes = np.array([a, y, b, x, b, b, b])
    guide.fill_tree(nodes, children, guesses, into)
    assert nodes.tolist()[:4] == [a, y, b, x] and nodes[4] in (inside, inside - 1)


def test_a_dead_end_in_a_tree_spoils_nothing_else(grammars):
    """The vocabulary has no A: nothing may follow the first child, and its sibling goes on."""
    made, tokenizer = grammars
    guide = made.guide(constraint_of({"regex": "c(bA|in|dd)"}), [2])
    c, b, d = (tokenizer.encode(x)[-1] for x in "cbd")
    inside = tokenizer.encode("in")[0]
    guide.advance([c])
    nodes = np.array([c, b, inside, d, d])
    into = np.full((5, len(guide.first_W)), 0xFFFFFFFF, np.uint32)
    assert guide.fill(into[0])
    guide.fill_tree(nodes, [[1, 2, 3], [], [], [4], []], None, into)
    assert nodes[1] != b and not into[0, nodes[1] >> 5] >> (nodes[1] & 31) & 1
    assert nodes[2:].tolist() == [inside, d, d]
    ends = into[2].copy()
    ends[:] = 0
    ends[0] = 1 << 2
    assert into[2].tolist() == into[4].tolist() == ends.tolist()
    guide.advance([d])
    assert allowed(guide, tokenizer) == ["d"]


def test_special_tokens_are_no_part_of_a_text(grammars):
    """A grammar that names one is refused."""
    made, _ = grammars
    with refused('unknown special token: "<s>"'):
        made.guide(constraint_of({"grammar": 'start: "c" (<s> | "d")'}), [2])


@pytest.mark.parametrize(
    ("given", "about"),
    [
        ({"json_schma": {}}, "did you mean 'json_schema'"),
        ({"json_schema": {}, "regex": "a"}, "a constraint is one of"),
        ({"json_object": False}, "json_object should be true"),
        ({"regex": ""}, "regex should be"),
        ({"choice": []}, "choice should be a list"),
        ({"grammar": '\n{"type": "object"}'}, "or in GBNF: give a schema as json_schema"),
        ({"regex": "a" * (1 << 18) + "b"}, "characters, more than"),
    ],
)
def test_what_is_no_constraint(given, about):
    with refused(re.escape(about)):
        Options(constraint=given)


def deep(n):
    schema = {"type": "string"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


def wide(n):
    names = [f"a{i}" for i in range(n)]
    return {"type": "object", "properties": {n: {} for n in names}, "required": names}


PATTERNS = [f".*{chr(97 + i)}.{{{i + 5}}}" for i in range(20)]
RULES = [f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(3000)]
HOSTILE = [
    {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
    {"json_schema": {"$ref": "http://127.0.0.1:1/schema"}},
    {"json_schema": deep(2000)},
    {"json_schema": False},
    {"regex": "(a"},
    {"regex": "(a" * 3000 + ")" * 3000},
    {"regex": "[A-Z]+"},  # which the vocabulary cannot spell
    {"grammar": "root ::= ("},
    # Minutes, gigabytes or an overflow of the stack, whatever the limits of llguidance.
    {"json_schema": {"type": "integer", "multipleOf": 9999991}},
    {"json_schema": {"allOf": [{"type": "string", "pattern": p} for p in PATTERNS]}},
    {"grammar": "start: /.*a.{18}/ & /.*b.{17}/ & ~/.*c.{15}/"},
    {"grammar": "start: r0\n" + "\n".join(RULES) + '\nr3000: "a" | ""\n'},
]


@contextlib.contextmanager
def bounded(megabytes):
    """The peak of the memory (where the system tells) grows by less in the block."""
    before = 0
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before = peak_megabytes()
    yield
    if before:
        assert peak_megabytes() - before < megabytes


def peak_megabytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.parametrize(
    "given", thinned(HOSTILE, *HOSTILE[:8], *HOSTILE[9:]), ids=map(str, range(len(HOSTILE)))
)
def test_what_cannot_be_is_one_sentence(grammars, given):
    with bounded(megabytes=100), refused(r"\w") as error:
        grammars[0].guide(constraint_of(given), [2])
    assert 10 < len(str(error.value)) < 400
    assert " s to compile" not in str(error.value), "refused after seconds, not after work"


def test_what_the_vocabulary_cannot_write_is_not_costly(grammars):
    with refused("cannot be met: the model has no token for what must come next"):
        grammars[0].guide(constraint_of({"regex": r"\[a+"}), [2])


def whole(guide, tokenizer, text):
    """Whether a text that its tokens spell is one that the guide's constraint allows."""
    matcher, ids = guide._matcher.deep_copy(), tokenizer.encode(text)
    ids = ids[ids[0] == tokenizer.bos_id :]
    n = matcher.validate_tokens(ids)
    return matcher.consume_tokens(ids[:n]) and n == len(ids) and matcher.is_accepting()


def one_of(words):
    quoted = [json.dumps(word) for word in words]
    return [
        {"choice": words},
        {"grammar": f"root ::= {' | '.join(quoted)}"},
        {"grammar": f"start: {' | '.join(quoted)}"},
    ]


def named(n):
    return {"type": "object", "properties": {f"p{i}": {} for i in range(n)}}


@pytest.mark.parametrize(
    ("given", "text"),
    [(given, "w2499") for given in one_of([f"w{i}" for i in range(2500)])]
    + [
        ({"choice": [f"w{i}" for i in range(25000)]}, "w24999"),
        ({"json_schema": named(700) | {"required": ["p699"]}}, '{"p699":null}'),
        ({"json_schema": {"anyOf": [named(120)] * 20}}, '{"p7":1,"p9":2}'),
    ],
    ids=["choice", "GBNF", "Lark", "many", "properties", "records"],
)
def test_many_alternatives(printable, given, text):
    made, tokenizer = printable
    assert whole(made.guide(constraint_of(given), [2]), tokenizer, text)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: NAME "end"', 'NAME takes its longest match, so "end" never follows it'),
        ('start: "x" | one "end!"\none: NAME', "NAME takes"),
        ('start: "x"\n  | "<" /.*/ ">"', "/.*/ takes"),
        ('start: NAME "!" DIGITS "!"\nDIGITS: /[0-9]+/', ""),
        ('start: lead\nlead[lazy]: NAME "end"', ""),
        ('start: NAME "end"?', ""),
        ('%ignore / +/\nstart: NAME "end"', ""),
        ('start: /[a-z]{3}/ "end"', ""),
    ],
)
def test_terminals_that_never_end(printable, grammar, why):
    """Refused instead of answered up to the limit."""
    given = constraint_of({"grammar": f"{grammar}\nNAME: /[a-z]+/"})
    with refused(re.escape(why)) if why else contextlib.nullcontext():
        assert printable[0].guide(given, [2]).possible


def test_alternatives_beyond_the_limit_are_refused(printable):
    """Not accepted, and their text ended before it is one of them."""
    words = [f"w{i}" for i in range(21000)]
    with refused("Current row has 21001 items"):
        printable[0].guide(constraint_of(one_of(words)[2]), [2])


KINDS = [
    {
        "type": "object",
        "properties": {"kind": {"const": kind}, "x": {"type": "integer"}},
        "additionalProperties": False,
    }
    for kind in (1, 2)
]
TEXTS = ["{}", '{"kind":1}', '{"kind":2,"x":3}', '{"kind":3}', "7", '"a b"']
TEXTS += ["[1,1]", "null"]
LARGE = {"maxLength": 2**32, "maxItems": 2**40, "minItems": 2.0}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "string", "format": "password"},
        {"format": "int32"},
        {"properties": {"format": {"format": "path"}}, "required": ["format"]},
        {"$defs": {"u": {"format": "uuid4"}}, "items": {"$ref": "#/$defs/u"}},
        {"enum": [{"format": "path", "uniqueItems": False}, 7]},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"type": "integer", "maximum": 2**63 - 1, "default": 2**80},
        {"type": ["string", "array"]} | LARGE,
        {"oneOf": [kind | {"required": ["kind"]} for kind in KINDS]},
        {"oneOf": [*KINDS, {"type": "null"}], "description": "no object"},
        {"oneOf": [KINDS[0] | {"required": ["kind"]}, KINDS[1] | {"required": ["x"]}]},
        {
            "$defs": {"a": KINDS[0], "one": {"const": 1}},
            "oneOf": [{"$ref": "#/$defs/a"}, KINDS[1]],
        },
    ],
    ids=str,
)
def test_schemas_that_are_served(printable, schema):
    """What they allow is what jsonschema says, except that constants that tell objects apart are there."""
    made, tokenizer = printable
    try:
        guide = made.guide(constraint_of({"json_schema": schema}), [2])
    except UserError as error:
        assert schema.get("description") == "no object" and "tell apart" in str(error)
        return
    for text in TEXTS:
        valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert whole(guide, tokenizer, text) == valid, text


@pytest.mark.parametrize(
    ("schema", "about"),
    [
        ({"type": "integer", "maximum": 2**63}, "'maximum' has a number beyond 2^63"),
        ({"properties": {"a": {"const": -(2**64)}}}, "'const' has a number beyond 2^63"),
        ({"type": "string", "minLength": 2**32}, "no answer is as long as 'minLength'"),
        ({"items": {"minItems": 1e12}}, "no answer is as long as 'minItems' asks"),
        ({"pattern": "a{0,99999999999}"}, "regex parse error: error: decimal literal"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "anyOf takes any"),
    ],
)
def test_schemas_that_are_refused(printable, schema, about):
    with refused(re.escape(about)):
        printable[0].guide(constraint_of({"json_schema": schema}), [2])


COSTLY = [
    {"regex": "(a?){50}(a){50}"},
    {"regex": ".*(a|b).{30}"},
    {"json_schema": wide(4000)},
    {"json_schema": {"allOf": [{"anyOf": [wide(3)] * 8}] * 6}},
    {"grammar": "start: a*\na: b*\nb: start* | /x?/\n"},
    {"regex": "ab" * 130000},
    {"json_schema": {"type": "integer", "multipleOf": 10007}},
    {"json_schema": {"type": "string", "pattern": "^(a|b){0,60000}$"}},
]


@pytest.mark.parametrize("given", COSTLY, ids=map(str, range(len(COSTLY))))
def test_what_is_costly_is_bounded(grammars, given):
    """Refused, or compiled with masks that take little memory."""
    with bounded(megabytes=300), contextlib.suppress(UserError):
        guide = grammars[0].guide(constraint_of(given), [2])
        bits = guide.first_W.copy()
        for _ in range(20):
            if not guide.fill(bits):
                break
            guide.advance([int(i) for i in range(32) if bits[0] >> i & 1][-1:])


def test_masks_of_a_long_literal_are_cheap(grammars):
    """Each mask reads only the beginning of what the grammar forces."""
    made, tokenizer = grammars
    guide = made.guide(constraint_of({"regex": "ab" * 60000}), [2])
    short = made.guide(constraint_of({"regex": "ab" * 100}), [2])
    assert guide.first_W.tolist() == short.first_W.tolist()
    bits = guide.first_W.copy()
    seen, true = [], tokenizer.encode
    with pytest.MonkeyPatch.context() as patch:
        spy = lambda text: seen.append(len(text)) or true(text)  # noqa: E731
        patch.setattr(tokenizer, "encode", spy)
        assert guide.fill(bits)
    assert max(seen, default=0) < 1000


def test_few_compiled_constraints_are_kept(grammars):
    made, _ = grammars
    for i in range(KEPT + 2):
        made.guide(constraint_of({"regex": f"a{{{i + 1}}}"}), [2])
    assert made._compiled.cache_info().currsize == KEPT


def test_ends_and_libraries_that_are_missing(grammars, monkeypatch):
    made, tokenizer = grammars
    fresh = Grammars(tokenizer, made._vocab_size)
    with refused("eos_ids has none of this model"):
        fresh.guide(Constraint("regex", "a"), [])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with refused("needs llguidance: pip install"):
        fresh.guide(Constraint("regex", "a"), [2])


@pytest.mark.parametrize(
    ("limits", "about"),
    [({"MOST_BYTES": 1 << 20}, "1 MiB"), ({"CPU_SECONDS": 1e-3}, "0.001 s")],
)
def test_the_message_names_the_limit_that_was_met(grammars, monkeypatch, limits, about):
    pytest.importorskip("resource")
    for name, value in limits.items():
        monkeypatch.setattr(f"medusa_jax.constraints.grammars.{name}", value)
    with refused(f"more than {about} to compile"):
        grammars[0].guide(constraint_of({"regex": "abc|limited"}), [2])


def test_a_schema_that_the_vocabulary_makes_costly_is_refused_at_once(
    tmp_path, monkeypatch
):
    """Not after `{"a0": `: each of these tokens reaches into the properties after a string."""
    pytest.importorskip("llguidance")
    monkeypatch.setitem(LIMITS, "step_max_items", 12_000)
    write_tokenizer(tmp_path, characters=PRINTABLE)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.backend.add_tokens(['","', '", "', '" ,"', '",\n"', '",  "'])
    made = Grammars(tokenizer, tokenizer.backend.get_vocab_size())

    def schema(n):
        properties = {f"a{i}": {"type": "string"} for i in range(n)}
        asked = {"type": "object", "properties": properties, "required": [f"a{n - 1}"]}
        return constraint_of({"json_schema": asked})

    made.guide(schema(100), [2])
    with refused("limit 12000; mask"):
        made.guide(schema(1000), [2])


# Tokens 45 and 46 are special, as most models have them; 47 is not.
THINK = 'root ::= <think> !</think>* </think> x\nx ::= "a" | <[47]>'


@pytest.mark.parametrize(
    ("grammar", "ids", "stuck"),
    [
        (THINK, [45, 5, 47, 45, 46, 47, 2], 0),
        (THINK, [45, 46, 46], 1),
        (THINK, [5], 1),
        (THINK, [45, 5, 2], 1),  # the grammar is not at its end
        ('root ::= ("a" <[45]>)+ # <nothing>', [5, 45, 5, 45, 2], 0),
        ('root ::= ("a" <[45]>){2}', [5, 45, 2], 1),
        ("root ::= .*", [5, 45], 1),
        ('root ::= "a" | "<think>"', [45], 1),
    ],
)
def test_tokens_of_gbnf(tmp_path, grammar, ids, stuck):
    """As grammars/README.md of llama.cpp has them: by text or number, negated with `!`; no end of the text."""
    pytest.importorskip("llguidance")
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    while tokenizer.backend.get_vocab_size() < 45:
        tokenizer.backend.add_tokens([f"~{tokenizer.backend.get_vocab_size()}"])
    tokenizer.backend.add_special_tokens(["<think>", "</think>"])
    tokenizer.backend.add_tokens(["<x>"])
    a = tokenizer.encode("a")[-1]
    guide = Grammars(tokenizer, 50).guide(constraint_of({"grammar": grammar}), [2])
    bits_W = guide.first_W.copy()
    *others, last = [a if i == 5 else i for i in ids]
    for token in others:
        guide.fill(bits_W)
        assert bits_W[token >> 5] >> (token & 31) & 1
        guide.advance([token])
    guide.fill(bits_W)
    assert bits_W[last >> 5] >> (last & 31) & 1 == 1 - stuck


def test_a_token_that_the_model_has_not(grammars):
    made, _ = grammars
    for token in ("<nothing>", "<[999]>"):
        with refused("cannot be"):
            made.guide(constraint_of({"grammar": f'root ::= "c" {token}'}), [2])


@pytest.mark.parametrize(
    "schema", ['{"type": "integer", "minimum": -9223372036854775808}', "{}"]
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_texts_with_a_mark_and_the_least_integer(grammars, schema, mark):
    assert constraint_of({"json_schema": mark + schema}).text == schema
    grammar = {"grammar": mark + 'root ::= "c"'}
    assert constraint_of(grammar) == constraint_of({"grammar": 'root ::= "c"'})


def test_a_keyword_of_null_is_absent():
    """As if the keyword were not there; a constant of null is a value."""
    inner = {"type": "object", "required": None, "properties": {"k": {"const": "x"}}}
    other = {"type": "object", "properties": {"k": {"const": None, "title": None}}}
    schema = {"oneOf": [inner, other], "enum": None, "maximum": None, "$defs": None}
    without = {
        "oneOf": [
            {k: v for k, v in inner.items() if v},
            {**other, "properties": {"k": {"const": None}}},
        ]
    }
    assert constraint_of({"json_schema": schema}) == constraint_of({"json_schema": without})
    for number in (2**63, -(2**63) - 1, float("nan")):
        with refused("a number beyond 2\\^63"):
            constraint_of({"json_schema": {"minimum": number}})


def follows(printable, schema, text):
    """Whether the whole text is an answer by the schema."""
    made, tokenizer = printable
    guide = made.guide(constraint_of({"json_schema": schema}), [2])
    for character in text:
        if character not in allowed(guide, tokenizer):
            return False
        guide.advance([tokenizer.token_to_id(character)])
    return 2 in ends(guide)


def ends(guide):
    bits = guide.first_W.copy()
    guide.fill(bits)
    return [i for i in range(32) if bits[0] >> i & 1]


SETS = [
    '[^"]',
    r'[^"\\]',
    r"[^\\]",
    r"[^\x22]",
    r'[^a-c"]',
    r'([^"]|d)',
    r'[^\s"\]]',
    "[^,]",
    r"\[[^\]]",
    r"\S",
    r"[\x00-!#-\x7f]",
]


@pytest.mark.parametrize("of", SETS)
def test_sets_that_exclude_quotes_exclude_them(of, printable):
    """Also as the name of a field; the library that checks schemas says what is right."""
    pytest.importorskip("llguidance")
    schema = {"type": "string", "pattern": f"^{of}*$"}
    fields = {"type": "object", "patternProperties": {f"^{of}*$": {"const": 1}}}
    fields |= {"additionalProperties": False}
    for value in ('d"', '"', "\\", "d\\d", "d,", "[d", "[]", "a", "d e", ""):
        right = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert follows(printable, schema, json.dumps(value)) == right, value
        assert follows(printable, fields, json.dumps({value: 1})) == right, value
