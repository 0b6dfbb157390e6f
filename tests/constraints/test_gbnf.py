"""GBNF: the language of a grammar is llama.cpp's, whatever its rules are split into."""

import ctypes
import random

import pytest

from medusa_jax.constraints.gbnf import lark_of
from medusa_jax.constraints.grammars import LIMITS

llguidance = pytest.importorskip("llguidance")

ARITHMETIC = r"""root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= id | num | "(" ws expr ")" ws
id ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*"""
# Grammar, text, what llama.cpp says: bytes that it allows, whether the text is whole.
CASES = [
    ('root ::= name "end"\nname ::= [a-z]+', "fooend", 6, True),
    ('root ::= name "end"\nname ::= [a-z]+', "fooen9", 5, False),
    ('root ::= "<t>" any "</t>"\nany ::= .*', "<t>x\n</t>", 9, True),
    ('root ::= "<t>" any "</t>" root?\nany ::= .*', "<t></t></t><t>a</t>", 19, True),
    ('root ::= "a" ws "\\n"\nws ::= [ \\n]*', "a \n", 3, True),
    ('root ::= d "0"\nd ::= [0-9]*', "100", 3, True),
    ('root ::= "(" root ")" | w "!"\nw ::= [a-z!]+', "(a!b!!)", 7, True),
    ('root ::= "x" root | "é" | [à-ü] "é"', "xxèé", 6, True),
    (ARITHMETIC, "a=3\n", 4, True),
    (ARITHMETIC, "(a1 +22\n)*b_ = c\n\n  \nd=e\n", 25, True),
    ('root ::= "\\u0041"', "A", 1, True),
    ("root ::= [\\u0041-\\u0043]+", "AB", 2, True),
    ('root ::= "\\U0001F600"', "😀", 4, True),
    ('root ::= "\\[" [a-z] "\\]"', "[a]", 3, True),
    ("root ::= [^\\n\\x41]", "A", 0, False),
    ('start ::= "b"\nroot ::= start # no Lark', "b", 1, True),
    ('root ::= a{2,3} "a"\na ::= "a" | "b"', "aba", 3, True),
    ('root ::= a{2} "x"\na ::= "ab"*', "ababx", 5, True),
    ('root ::= Some-Rule\nSome-Rule ::= [-+a-] | ""', "-", 1, True),
    ('root ::= [+\\-a]+ "\\-"', "+-a--", 5, True),
    ("root ::= [\\--0]+", "-.0,", 3, False),
]


def matcher_of(grammar):
    lark = llguidance.LLMatcher.grammar_from_lark(lark_of(grammar))
    limits = llguidance.LLParserLimits(**LIMITS)
    tokens = llguidance.LLTokenizer("byte")
    return llguidance.LLMatcher(tokens, lark, log_level=0, limits=limits)


def ours(matcher, text):
    matcher, data = matcher.deep_copy(), list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    allowed = matcher.validate_tokens(data)
    matcher.consume_tokens(data[:allowed])
    return allowed, allowed == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "text", "allowed", "whole"), CASES)
def test_texts(grammar, text, allowed, whole):
    assert ours(matcher_of(grammar), text) == (allowed, whole)


ODD_RULE = 'root ::= ("a" |\n "b") # one\n  # two\n\n"c"? ::= '


@pytest.mark.parametrize(
    ("grammar", "about"),
    [
        ('root ::= "a\\q"', "line 1: GBNF has no character"),
        ('root ::= a\na ::= "\\uD800"', "line 2: GBNF has no character"),
        (ODD_RULE, "line 5: a rule begins"),
        ('root ::= "a" )', "line 1: a rule begins"),
        ('root ::= ("a"\n', "line 1: a '\\)' is missing"),
        ('root ::= "a"\nb := "c"', "line 2: .* is not part of a rule"),
        ("root ::= * [a]", "line 1: '\\*' does not belong here"),
        ("root ::= [z-a]", "line 1: .* is not a set of characters"),
        ('root ::= "a"{3,2}', "line 1: the most in"),
        ("root ::= nothing", "there is no rule 'nothing'"),
        (
            'root ::= "a"\n  x ::= !<two words>',
            "line 2: '<two words>' is not one token of the model",
        ),
        ("root ::= <[x]>", "line 1: .* is not one token"),
        ('root ::= ! "a"', "line 1: .* is not part of a rule"),
        ('other ::= "a"', "there is no rule 'root'"),
    ],
)
def test_what_cannot_be_read(grammar, about):
    with pytest.raises(ValueError, match=about):
        lark_of(grammar)


class LlamaCpp:
    """The grammar engine of llama.cpp, with a vocabulary of bytes."""

    def __init__(self, path):
        from gguf_files import bytes_metadata, shape_metadata, write

        self.c = c = pytest.importorskip("llama_cpp").llama_cpp
        shape = shape_metadata("llama", vocab_size=259)
        write(path, bytes_metadata() | shape, {})
        self.quiet = c.llama_log_callback(lambda *_: None)
        c.llama_log_set(self.quiet, ctypes.c_void_p(0))
        params = c.llama_model_default_params()
        params.vocab_only = True
        self.model = c.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = c.llama_model_get_vocab(self.model)

    def _allows(self, sampler, token):
        data = (self.c.llama_token_data * 1)(self.c.llama_token_data(token, 0.0, 0.0))
        array = self.c.llama_token_data_array(data, 1, -1, False)
        self.c.llama_sampler_apply(sampler, ctypes.byref(array))
        return data[0].logit == 0

    def __call__(self, grammar, text):
        """Bytes that are allowed, and whether the text is whole; None: it refuses the grammar."""
        sampler = self.c.llama_sampler_init_grammar(self.vocab, grammar.encode(), b"root")
        if not sampler:
            return None
        allowed, data = 0, text.encode()
        while allowed < len(data) and self._allows(sampler, data[allowed] + 3):
            self.c.llama_sampler_accept(sampler, data[allowed] + 3)
            allowed += 1
        whole = allowed == len(data) and self._allows(sampler, 2)
        self.c.llama_sampler_free(sampler)
        return allowed, whole


LEAVES = ['"a"', '"b"', '"ab"', '"ba"', '"abc"', "[a-b]", "[b-c]", "[^a]", '"\\x63"', '"é"']
LEAVES += ["[à-ü]", ".", '""', '"\\u0061"', '"\\n"']
TIMES = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"]


def random_part(rng, depth, names):
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(LEAVES)
    if kind < 0.5:
        return rng.choice(names)
    parts = [random_part(rng, depth - 1, names) for _ in range(rng.randint(1, 3))]
    if kind < 0.75:
        return " ".join(parts)
    return f"({' | '.join(parts)})" + (rng.choice(TIMES) if kind > 0.85 else "")


def random_grammar(rng):
    names = ["root", "x", "y", "z"][: rng.randint(1, 4)]
    return "\n".join(
        f"{name} ::= "
        + " | ".join(random_part(rng, 2, names) for _ in range(rng.randint(1, 3)))
        for name in names
    )


def mutated(rng, text):
    """The text, or its beginning, with a character changed."""
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(["", "a", " ", '"', "\n", "é"]) + text[at + 1 :]


@pytest.mark.wide
def test_the_language_is_that_of_llama_cpp(tmp_path):
    theirs = LlamaCpp(tmp_path / "bytes.gguf")
    rng, compared, whole = random.Random(0), 0, 0
    assert theirs(ODD_RULE, "") is None
    for grammar, text, *expected in CASES:
        assert theirs(grammar, text) == tuple(expected)
    samples = [(grammar, [text]) for grammar, text, *_ in CASES]
    published = pytest.importorskip("llama_cpp.llama_grammar")
    texts = [
        '{"a": [1, -2.5e3, true, null], "b c": {"d": "e\\n\\u00e9"}}',
        '[\n1,\n"a"]',
        "a=3\nb = c * 2\n",
        "1. e4 e5\n2. Nf3 Nc6\n",
        "int f(int x){return x;}",
        "- one\n- two\n",
        "Hello, you!",
        "あア",
    ]
    for name in ("ARITHMETIC", "C", "CHESS", "JSON", "JSON_ARR", "LIST", "JAPANESE"):
        samples.append((getattr(published, f"{name}_GBNF"), texts))
    while len(samples) < 150:
        grammar = random_grammar(rng)
        if theirs(grammar, "") is not None:
            word = "".join(rng.choices("aaabbbccéèd\n", k=rng.randint(0, 6)))
            samples.append((grammar, [word, "a", "ab", "ba", "abc", "abab"]))
    for grammar, some in samples:
        matcher = matcher_of(grammar)
        for text in [*some, *(mutated(rng, text) for text in some for _ in range(10))]:
            expected = theirs(grammar, text)
            assert ours(matcher, text) == expected, (grammar, text)
            compared, whole = compared + 1, whole + expected[1]
    assert compared > 5000 and whole > 500
    print(f"\n{len(samples)} grammars, {compared} texts, {whole} of them whole")
