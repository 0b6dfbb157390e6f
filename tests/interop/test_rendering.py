"""Chat templates in their process: as transformers renders them, and never without end."""

import os
import signal
import time

import pytest
from cases import thinned
from children import output_of

from medusa_jax.errors import UserError
from medusa_jax.interop import chat
from medusa_jax.interop.rendering import Renderer

TALK = [
    {"role": "user", "content": "Hello? 😀 é"},
    {"role": "assistant", "content": "  I am\nfine "},
    {"role": "user", "content": "</s>{{ 7 * 7 }}"},
]
BIG = 10**10
HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": f"{{{{ {BIG} ** {BIG} }}}}",
    "times": f"{{{{ 'a' * {BIG} }}}}",
    "list": f"{{{{ [0] * {BIG} }}}}",
    "doubled": "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "nested": "{% set n = namespace(s=['ab']) %}{% for i in range(60) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "filter": f"{{{{ 'a' | center({BIG}) }}}}",
    "format": f"{{{{ '%{BIG}d' % 1 }}}}",
    "lipsum": f"{{{{ lipsum(n={BIG}) }}}}",
    "output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
}
RECURSIVE = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
# What templates of published models use, beyond those that are shipped.
SANE = {
    "trimmed": "{{ bos_token }}\n  {% for m in messages %}\n  {{- m.content | trim }}|{% endfor %}\n",
    "found": "{% set ns = namespace(found=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.found = loop.index %}{% endif %}{% endfor %}{{ ns.found }}",
    "json": "{{ messages | tojson }}{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}",
    "macro": "{% macro turn(m) %}[{{ m['role'].upper() }}]{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "control": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
    "{% break %}{% endfor %}",
    "tests": "{% if tools is not none %}T{% endif %}{% if documents is defined %}D{% endif %}"
    "{{ messages[0]['content'].split()[0] ~ messages | length }}{{ x is defined }}",
    "prompt": "{% if add_generation_prompt %}A:{% endif %}{{ dict(a=1).a }}{{ messages[-1].content }}",
    "date": "{{ strftime_now('%Y') }}",
    "marks": "{% for m in messages %}{{ m.role }}{%- generation -%} {{ m.content }}"
    "{% endgeneration %}\n{% endfor %}",
}


@pytest.fixture
def hurried(monkeypatch):
    """A renderer with little of everything, in the place of the one for all."""
    renderer = Renderer(seconds=0.2, most_bytes=200 << 20, most_characters=10**6)
    monkeypatch.setattr(chat, "RENDERER", renderer)
    return renderer


@pytest.mark.parametrize("name", thinned(HOSTILE, "power", "nested", "output"))
def test_a_template_without_end_is_stopped(name, hurried):
    start = time.monotonic()
    with pytest.raises(UserError, match="the chat template is stopped: it ") as error:
        chat.render(HOSTILE[name], TALK, {})
    assert time.monotonic() - start < 5
    assert "\n" not in str(error.value) and not isinstance(error.value, chat.SampleError)
    assert chat.render("{{ messages[0].content }}", TALK, {})[0] == TALK[0]["content"]


def test_errors_of_a_template_end_nothing(hurried):
    assert chat.render("a", TALK, {})[0] == "a"
    process = hurried.process._process
    for source in (RECURSIVE, "{{ namespace(_a=1) }}", "{{ none.x.y }}"):
        with pytest.raises(
            chat.SampleError, match=r"refuses the conversation: \S"
        ) as error:
            chat.render(source, TALK, {})
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="template is broken"):
        chat.render("{% for %}", TALK, {})
    assert chat.render("b", TALK, {})[0] == "b" and hurried.process._process is process


@pytest.mark.parametrize("name", [*SANE, *chat.TEMPLATES])
def test_as_transformers_renders(name):
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    source = SANE.get(name) or chat.shipped_template(name)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for prompt in (False, True):
        [text], spans = theirs.render_jinja_template(
            [TALK], chat_template=source, return_assistant_tokens_mask=True,
            add_generation_prompt=prompt, **dict.fromkeys(chat.SPECIALS, "") | special,
        )  # fmt: skip
        assert chat.render(source, TALK, special, prompt) == (text, spans[0])


def test_a_process_that_is_gone_is_started_again(hurried):
    assert chat.render("a", TALK, {})[0] == "a"
    os.kill(hurried.process._process.pid, signal.SIGKILL)
    hurried.process._process.wait()
    assert chat.render("b", TALK, {})[0] == "b"


FORKS = """
import os
import signal

from medusa_jax.interop.rendering import Renderer

render = Renderer()
text = lambda source: render(source)["text"]
print(text("a"), flush=True)
before = render.process._process.pid
with render.process._lock:  # as if another thread were rendering
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(not (text("b") == "b" and render.process._process.pid != before))
assert os.waitpid(child, 0)[1] == 0
assert text("c") == "c" and render.process._process.pid == before
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_its_own():
    """And its own lock: the one it came with may be held for ever."""
    assert output_of(FORKS) == "a\n"
