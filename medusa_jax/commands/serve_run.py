"""`serve` after its flags are parsed."""

import gc
import ipaddress
import os
import signal
import socket
import sys
import time
from typing import NoReturn

from medusa_jax.api import Model
from medusa_jax.commands.model_flags import load_model, make_learner
from medusa_jax.commands.serve_flags import Flags
from medusa_jax.console import log
from medusa_jax.devices.machine import give_memory_back, warn_if_accelerator_unused
from medusa_jax.errors import UserError
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.serving import Server
from medusa_jax.text.chat import PLAIN, is_chat_model, template_source
from medusa_jax.whole_files import read_text

KEY = "MEDUSA_API_KEY"


def run(flags: Flags) -> NoReturn:
    """Serve until SIGTERM or Ctrl-C, then end the process; its status is 1 if errors ended the server."""
    check_extra()
    key = read_key(flags.api_key_file)
    if not (flags.timeout > 0 and flags.read_timeout > 0):  # nan is not, either
        raise UserError("--timeout and --read_timeout must be more than 0")
    # Tracing a program must not hold up the thread that decodes at each of its turns for 5 ms.
    sys.setswitchinterval(0.001)
    with listening(flags.host, flags.port) as listener:
        give_memory_back()
        use_compilation_cache()
        warn_if_accelerator_unused()
        model = load_model(flags, tree=flags.tree, tokenizer=flags.tokenizer)
        template = chosen_template(model, flags.chat, flags.model)
        learner = make_learner(flags, model)
        # A full collection while a program is traced stops every thread: for 0.2 to 0.4 s with all that is
        # imported by now.
        gc.collect()
        gc.freeze()
        with Server(
            model,
            slots=flags.slots,
            queue=flags.queue,
            max_prompt_tokens=flags.max_prompt_tokens,
            max_new_tokens=flags.max_new_tokens,
            learner=learner,
        ) as server:
            if flags.warm_up:
                server.warm_up(min(flags.warm_up, model.config.max_position), wait=False)
                log(
                    "compiling ahead while no call is answered, the likeliest programs first"
                )
            answer_calls(listener, server, template, key, flags)
        if server.failed:
            log("error: the server ended after repeated errors; start it again")
    # Every answer has been sent. An ordinary exit would wait for a compilation.
    os._exit(int(server.failed))


def answer_calls(
    listener: socket.socket, server: Server, template: str, key: str, flags: Flags
) -> None:
    """Serve until a signal; running answers are finished, new calls are refused."""
    from medusa_jax.serving.http import Limits, make_app, make_listener

    limits = Limits(
        flags.max_body, flags.timeout, flags.read_timeout, connections=most_connections()
    )
    name = flags.name or server.model.name
    host, port = listener.getsockname()[:2]
    app = make_app(
        server,
        name=name,
        template=template,
        key=key,
        limits=limits,
        hosts=known_hosts(host, flags.host, key),
        log_all=flags.log == "requests",
    )
    shown = f"[{host}]" if ":" in host else host
    url, start = f"http://{shown}:{port}", time.monotonic()
    log(f"{name}: compiling the first program; the page is there: {url}/")

    def announce() -> None:
        seconds = time.monotonic() - start
        log(f"{name}: ready after {seconds:.1f} s: {url}/ is the page, {url}/v1 the API")

    server.prepare(announce)
    if not key and not ipaddress.ip_address(host).is_loopback:
        log(f"warning: others can reach {shown} and there is no key: set {KEY}")
    # uvicorn raises the signal again when it is done; by then it is served.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    http = make_listener(app, limits, flags.drain)
    server.when_failed(lambda: setattr(http, "should_exit", True))
    http.run([listener])


def chosen_template(model: Model, template: str | None, name: str | None) -> str:
    """The chat template: the given one, a chat model's own (""), or "plain".

    Args:
      name: the model as --model names it.

    Raises:
      UserError: the template is unknown, or does not fit the tokenizer.
    """
    if template is None:
        if is_chat_model(model.tokenizer, name):
            return ""
        if model.tokenizer.chat_template:
            log("turns are joined by empty lines; --chat applies the model's template")
        return PLAIN
    if template != PLAIN:
        template_source(model.tokenizer, template)
    return template


def read_key(file: str | None) -> str:
    """The key that clients must send; "" for none.

    Raises:
      UserError: the file cannot be read or contains no key, or one that clients cannot send.
    """
    if file is None:
        where, key = f"the variable {KEY}", os.environ.get(KEY, "")
        if not key:
            return ""
    else:
        where = f"--api_key_file {file}"
        key = read_text(file, where)
    key = key.strip()
    if not key:
        raise UserError(f"{where} holds no key")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{where} holds a key with characters outside printable ASCII")
    return key


def known_hosts(address: str, host: str, key: str) -> list[str]:
    """The names that a request may give as its host; empty for any.

    Without a key, a page of another site could reach a server that only this machine can, by a name of
    that site that resolves to 127.0.0.1.

    Args:
      address: that it listens on.
      host: the host that was asked for.
    """
    if key or not ipaddress.ip_address(address).is_loopback:
        return []
    return ["localhost", "127.0.0.1", "::1", "[::1]", address, host]


def most_connections() -> int:
    """Limit of open connections, each of which is an open file."""
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(1000, files - 192))  # some are the model's


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything that takes its time.

    Raises:
      UserError: the address is not available.
    """
    if not host:  # which would be every address of the machine
        raise UserError("--host is empty: give the address to listen on")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error}") from error


def check_extra() -> None:
    """Refuse with a one-line error if a package of the extra `serve` is missing."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"serving needs {error.name}: pip install 'medusa-jax[serve]'"
        ) from error
