"""Chat templates, rendered in the sandbox in which transformers renders them.

The environment is transformers' own, written out here because importing transformers takes most of a second;
`tests/text/test_chat.py` compares the two. A template's author also supplies the model's weights: the sandbox keeps
a template away from Python's internals, but does not limit its time or memory.
"""

import json
from contextvars import ContextVar
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json

Span = tuple[int, int]
# The pieces of the text that is being rendered, and the spans of its generation blocks so far.
_RENDERING: ContextVar[tuple[list[str], list[Span]]] = ContextVar("rendering")


class SampleError(UserError):
    """A conversation is unusable; a trainer skips it and counts the reason."""


@cache
def _environment() -> Any:
    """The sandbox, with the functions that chat templates expect."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: records the position of the block's text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            text: str = caller()
            pieces, spans = _RENDERING.get()
            start = sum(map(len, pieces))
            spans.append((start, start + len(text)))
            return text

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        form: Json = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    environment: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=8)
def variables_of(source: str) -> frozenset[str]:
    """The variables that a template reads and its caller can set.

    Raises:
      UserError: the template is invalid.
    """
    from jinja2 import TemplateSyntaxError, meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template is broken: {error}") from error


def render_template(source: str, fields: Json) -> tuple[str, list[Span]]:
    """Run a template; return its text and the [start, end) of its generation blocks.

    Raises:
      SampleError: the template raises an error.
      UserError: the template is invalid.
    """
    from jinja2 import TemplateSyntaxError

    pieces: list[str] = []
    spans: list[Span] = []
    token = _RENDERING.set((pieces, spans))
    try:
        for piece in _compiled(source).generate(**fields):
            pieces.append(piece)
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template is broken: {error}") from error
    except Exception as error:  # raise_exception, or an operation on unexpected content
        problem = str(error).split("\n")[0]
        raise SampleError(
            f"the chat template refuses the conversation: {problem}"
        ) from error
    finally:
        _RENDERING.reset(token)
    return "".join(pieces), spans
