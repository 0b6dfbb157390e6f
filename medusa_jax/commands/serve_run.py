"""What `serve` does once its flags are parsed."""

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from medusa_jax.commands.flags import load_model, parse_mesh
from medusa_jax.console import (
    inform,
    use_compilation_cache,
    warn_if_accelerator_unused,
)
from medusa_jax.errors import UserError
from medusa_jax.evaluate.conversation import PLAIN
from medusa_jax.interop.chat import template_source
from medusa_jax.serving import Server, row_sizes
from medusa_jax.serving.trees import trees_by_rows

KEY = "MEDUSA_API_KEY"


def run(flags: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status."""
    uvicorn = _uvicorn()
    key = read_key(flags.api_key_file)
    positive = ("slots", "queue", "max_prompt_tokens", "max_new_tokens", "max_body")
    for name in (*positive, "timeout", "read_timeout"):
        value = getattr(flags, name)
        if value is not None and not value > 0:  # nan is not, either
            raise UserError(f"--{name} must be more than 0, not {value}")
    # Tracing a program must not hold up the thread that decodes at each of its turns for 5 ms.
    sys.setswitchinterval(0.001)
    with listening(flags.host, flags.port) as listener:
        use_compilation_cache()
        warn_if_accelerator_unused()
        model = load_model(
            flags,
            tree=flags.tree,
            mesh=parse_mesh(flags.mesh),
            tokenizer=flags.tokenizer,
        )
        template = chosen_template(model, flags.chat)
        trees = trees_by_rows(model, row_sizes(flags.slots), flags.tree == "auto")
        with Server(
            model,
            slots=flags.slots,
            trees=trees,
            queue=flags.queue,
            max_prompt_tokens=flags.max_prompt_tokens,
            max_new_tokens=flags.max_new_tokens,
        ) as server:
            if flags.warm_up:
                most = min(flags.warm_up, model.config.max_position)
                server.warm_up(most, [(True, "auto")], wait=False)
                inform(
                    "compiling ahead, the smallest batch first; calls are answered meanwhile"
                )
            answer_calls(uvicorn, listener, server, template, key, flags)
            if server.failed:
                inform("error: the server ended after repeated errors; start it again")
            return int(server.failed)


def answer_calls(
    uvicorn: Any,
    listener: socket.socket,
    server: Server,
    template: str,
    key: str,
    flags: argparse.Namespace,
) -> None:
    """Run the port until a signal ends it: what runs is finished, nothing new is taken."""
    from medusa_jax.serving.http import Limits, make_app

    limits = Limits(flags.max_body, flags.timeout, flags.read_timeout)
    name = flags.name or flags.model or "demo"
    app = make_app(server, name=name, template=template, key=key, limits=limits)
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=flags.drain,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 * 1024,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    inform(f"{name}: http://{shown}:{port}/ is the page, http://{shown}:{port}/v1 the API")
    if not key and host not in ("127.0.0.1", "::1"):
        inform(f"warning: others can reach {shown} and there is no key: set {KEY}")
    # uvicorn raises the signal again when it is done; by then it is served.
    signal.signal(signal.SIGTERM, lambda *_: None)
    port = uvicorn.Server(config)
    server.when_failed(lambda: setattr(port, "should_exit", True))
    port.run([listener])


def chosen_template(model: Any, asked: str | None) -> str:
    """The chat template: what was asked for, the tokenizer's own (""), or "plain".

    Raises:
      UserError: there is no such template, or it does not fit the tokenizer.
    """
    if asked is None:
        return "" if model.tokenizer.chat_template else PLAIN
    if asked != PLAIN:
        template_source(model.tokenizer, asked)
    return asked


def read_key(file: str | None) -> str:
    """The key that clients must send; "" for none.

    Raises:
      UserError: the file cannot be read or holds nothing.
    """
    if file is None:
        return os.environ.get(KEY, "")
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --api_key_file {file}: {error}") from error
    if not key:
        raise UserError(f"--api_key_file {file} holds no key")
    return key


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything that takes its time.

    Raises:
      UserError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error}") from error


def _uvicorn() -> Any:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(
            f"serving needs {error.name}: pip install 'medusa-jax[serve]'"
        ) from error
    return uvicorn
