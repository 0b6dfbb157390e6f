"""The process that chat templates run in: a file of its own, which `rendering.py` starts.

A template is a program that came with a model. Here it can loop without end or ask for any amount of
memory: the process has so many seconds and bytes, and whoever started it goes on without it. It reads
lines of JSON from stdin and answers each with one; its environment is the one that transformers renders
chat templates in, without importing it.
"""

import json
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any


def limit(seconds: float, most_bytes: int) -> None:
    """Bound memory for good, and the seconds of CPU time until the next call; 0 are no bound.

    Without a handler the signal ends the process, even in the middle of one long operation.
    """
    with suppress(ImportError, OSError, ValueError):  # systems that cannot
        import resource

        if most_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


class Dictionaries:
    """`dict` of templates: makes dictionaries, and shows nothing of the type."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def make_environment() -> Any:
    """The sandbox that templates are compiled in, with what chat templates expect of it."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def check_name(name: Any) -> None:
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
        """{% generation %} ... {% endgeneration %}: where in the text the block came out."""

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


def answer(environment: Any, template: Any, fields: dict[str, Any], most: int) -> Any:
    """{"text", "spans"}, or {"limit"}: why it was not rendered to its end."""
    environment.written, environment.spans, pieces = 0, [], []
    for piece in template.generate(**fields):
        pieces.append(piece)
        environment.written += len(piece)
        if environment.written > most:
            return {"limit": f"it writes more than {most} characters"}
    return {"text": "".join(pieces), "spans": environment.spans}


def main() -> None:
    """Answer line after line until stdin ends."""
    paths, seconds, most_bytes, most_characters = json.loads(sys.argv[1])
    sys.path = paths
    for sent_to_all in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # it ends with the one that started it
        signal.signal(sent_to_all, signal.SIG_IGN)
    import jinja2

    environment = make_environment()
    compiled = lru_cache(maxsize=8)(environment.from_string)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            limit(seconds, most_bytes)
            template = compiled(request["source"])
            given = answer(environment, template, request["fields"], most_characters)
        except jinja2.TemplateSyntaxError as error:
            given = {"broken": str(error)}
        except MemoryError:
            given = {"limit": f"it takes more than {most_bytes >> 20} MiB"}
        except (
            Exception
        ) as error:  # raise_exception, or any operation on unexpected content
            given = {"refused": str(error).split("\n")[0]}
        limit(0, 0)
        sys.stdout.write(json.dumps(given) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
