"""The child process for chat templates, started by `rendering.py`.

A template is a program that came with a model and may loop for ever or allocate any amount of memory, so this
process has limits on both. It reads lines of JSON from stdin and answers each with one. Its environment
reproduces the one in which transformers renders chat templates, without importing transformers.
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
    """Limit memory, and CPU time until the next call; 0 means no limit.

    Without a handler the signal ends the process, even during a long operation.
    """
    with suppress(ImportError, OSError, ValueError):  # unsupported by this system
        import resource

        if most_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


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


def main() -> None:
    """Answer requests until stdin ends."""
    paths, seconds, most_bytes, most_characters = json.loads(sys.argv[1])
    sys.path = paths
    # Signals to the process group are for the parent; this process ends when the parent does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import jinja2

    environment = make_environment()
    compiled = lru_cache(maxsize=8)(environment.from_string)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            limit(seconds, most_bytes)
            template = compiled(request["source"])
            result = answer(environment, template, request["fields"], most_characters)
        except jinja2.TemplateSyntaxError as error:
            result = {"broken": str(error)}
        except MemoryError:
            result = {"limit": f"it takes more than {most_bytes >> 20} MiB"}
        except Exception as error:  # raise_exception, or an operation on unexpected content
            result = {"refused": str(error).split("\n")[0]}
        limit(0, 0)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
