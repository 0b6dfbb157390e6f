"""The flags of `serve`."""

import dataclasses

from medusa_jax.commands.flags import at_least, flag
from medusa_jax.commands.model_flags import LearnFlags, ModelFlags

EXAMPLES = """examples:
  medusa serve
  medusa serve --model smollm2 --slots 4 --warm_up 1024
  MEDUSA_API_KEY=secret medusa serve --host 0.0.0.0 --port 80
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(LearnFlags, ModelFlags):
    """Answer many requests at a time (docs/serving.md)."""

    tokenizer: str | None = flag("directory or hub id, if not next to the model", None)
    tree: str = flag(
        "as for decode; auto chooses a size of the tree file's tree for each chunk of steps",
        "auto",
    )
    chat: str | None = flag(
        "chat template: a shipped one by name, plain (an empty line between turns), or without a "
        "value the model's own (default: a chat model's own, plain for other models)",
        None,
        nargs="?",
        const="",
        metavar="TEMPLATE",
    )
    name: str | None = flag(
        "what clients call the model (default: --model without its folder, or demo)", None
    )
    host: str = flag("address to listen on", "127.0.0.1")
    port: int = flag("0 takes a free one", 8000, type=at_least(0))
    slots: int = flag("requests answered at a time", 8, type=at_least(1))
    queue: int = flag("requests that may wait", 64, type=at_least(1))
    max_prompt_tokens: int | None = flag(
        "default: as many as fit in the context", None, type=at_least(1)
    )
    max_new_tokens: int | None = flag(
        "of an answer (default: as many as fit in the context)", None, type=at_least(1)
    )
    max_body: int = flag("bytes of a call", 1 << 20, type=at_least(1))
    timeout: float = flag(
        "for an answer, waiting included", 600.0, type=at_least(0, float), metavar="SECONDS"
    )
    read_timeout: float = flag(
        "for a client to send its call, and to read its answer",
        30.0,
        type=at_least(0, float),
        metavar="SECONDS",
    )
    drain: int = flag(
        "for running answers to end after SIGTERM", 60, type=at_least(0), metavar="SECONDS"
    )
    warm_up: int = flag(
        "compile programs ahead for texts of up to this many tokens; 0: none",
        256,
        type=at_least(0),
        metavar="TOKENS",
    )
    log: str = flag(
        "requests: a line for every call, not only for those that are refused or fail",
        "errors",
        choices=("errors", "requests"),
    )
    api_key_file: str | None = flag(
        "a key that clients must send (default: the variable MEDUSA_API_KEY; none: all may)",
        None,
        metavar="FILE",
    )
