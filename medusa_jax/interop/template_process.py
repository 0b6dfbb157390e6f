"""Chat templates, in the child process of `rendering.py`.

A template is a program that came with a model and may loop for ever or allocate any amount of memory. The
environment reproduces the one in which transformers renders chat templates, without importing transformers.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any


class Dictionaries:
    """`dict` for templates: creates dictionaries without exposing the type."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def make_environment() -> Any:
    """The sandbox for templates, with the functions that chat templates expect."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace's field {name!r}")

    class Namespace(jinja2.utils.Namespace):
        def __init__(self, /, *items: Any, **named: Any) -> None:
            fields = dict(*items, **named)
            for name in fields:
                check_name(name)
            super().__init__(fields)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

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
            start = environment.written
            environment.spans.append((start, start + len(text)))
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
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": Dictionaries(),
        "namespace": Namespace,
    }
    return environment


def answer(
    environment: Any, template: Any, fields: dict[str, object], most: int
) -> dict[str, object]:
    """{"text", "spans"}, or {"limit"}: the exceeded limit."""
    environment.written, environment.spans, pieces = 0, [], []
    for piece in template.generate(**fields):
        pieces.append(piece)
        environment.written += len(piece)
        if environment.written > most:
            return {"limit": f"it writes more than {most} characters"}
    return {"text": "".join(pieces), "spans": environment.spans}


def make_answer(most_characters: int) -> Callable[[Any], Any]:
    """Template and fields of a request -> text and spans, or what is wrong."""
    import jinja2

    environment = make_environment()
    compiled = lru_cache(maxsize=8)(environment.from_string)

    def answer_to(request: Any) -> dict[str, object]:
        try:
            template = compiled(request["source"])
            return answer(environment, template, request["fields"], most_characters)
        except jinja2.TemplateSyntaxError as error:
            return {"broken": str(error)}
        except MemoryError:
            raise
        except Exception as error:  # raise_exception, or an operation on unexpected content
            return {"refused": str(error).split("\n")[0]}

    return answer_to
