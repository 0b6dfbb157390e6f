"""The flags of `serve`."""

import argparse
import dataclasses

from medusa_jax.commands.flags import (
    ModelFlags,
    add_model,
    add_no_repeat,
    at_least,
    command,
)

EXAMPLES = """examples:
  python -m medusa_jax serve
  python -m medusa_jax serve --model smollm2 --slots 4 --warm_up 1024
  MEDUSA_API_KEY=secret python -m medusa_jax serve --host 0.0.0.0 --port 80
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags):
    """Flags of `serve`."""

    tokenizer: str | None
    tree: str
    mesh: str
    chat: str | None
    name: str | None
    host: str
    port: int
    slots: int
    queue: int
    max_prompt_tokens: int | None
    max_new_tokens: int | None
    max_body: int
    timeout: float
    read_timeout: float
    drain: int
    warm_up: int
    api_key_file: str | None


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command("serve", "Answer many requests at a time (docs/serving.md).", EXAMPLES)
    add_model(p)
    add_no_repeat(p)
    add = p.add_argument
    add("--tokenizer", help="directory or hub id, if not next to the model")
    add(
        "--tree",
        default="auto",
        help="as for decode; auto is measured for each number of rows (default: auto)",
    )
    add("--mesh", default="1,1,1", help="devices along data,fsdp,tensor")
    add(
        "--chat",
        metavar="TEMPLATE",
        help="chat template: a shipped one by name, or plain: turns with an empty line between "
        "(default: the tokenizer's own, plain if it has none)",
    )
    add("--name", help="what clients call the model (default: --model, or demo)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=at_least(0), default=8000, help="0 takes a free one (default: 8000)")
    add("--slots", type=int, default=8, help="requests answered at a time (default: 8)")
    add("--queue", type=int, default=64, help="requests that may wait (default: 64)")
    add("--max_prompt_tokens", type=int, help="default: what the context holds")
    add("--max_new_tokens", type=int, help="of an answer (default: what the context holds)")
    add("--max_body", type=int, default=1 << 20, help="bytes of a call (default: 1048576)")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for an answer, waiting included (default: 600)",
    )
    add(
        "--read_timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for a client to send its call, and to take what it is sent (default: 30)",
    )
    add(
        "--drain",
        type=at_least(0),
        default=60,
        metavar="SECONDS",
        help="for running answers to end after SIGTERM (default: 60)",
    )
    add(
        "--warm_up",
        type=at_least(0),
        default=256,
        metavar="TOKENS",
        help="compile ahead what texts of up to this many tokens need; 0: nothing "
        "(default: 256)",
    )
    add(
        "--api_key_file",
        metavar="FILE",
        help="a key that clients must send (default: the variable MEDUSA_API_KEY; none: all may)",
    )
    return p
