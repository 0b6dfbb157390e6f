"""decode.py, `medusa decode`: generate text with draft heads, stream it, measure it."""

import time

from medusa_jax.commands.decode_flags import EXAMPLES, NOTHING_ASKED, Flags
from medusa_jax.commands.flags import CommandLine, file_to_write, on_hosts
from medusa_jax.compiler import begin
from medusa_jax.errors import UserError
from medusa_jax.files.hub import resolve


def run(flags: Flags) -> int:
    """Decode; returns the exit status."""
    began = time.perf_counter()

    def decode(flags: Flags) -> int:
        begin_last_programs()
        from medusa_jax.commands import decode_run

        return decode_run.run(flags, began)

    # JAX is imported after the checks, for quick errors, and while the kernels compile.
    check(flags)
    begin()
    if flags.model is not None:
        resolve(flags.model)
    return on_hosts(decode)(flags)


def begin_last_programs() -> None:
    """Begin to read the programs of the last start, while the rest of the command is imported."""
    from medusa_jax.kept_programs import use_compilation_cache
    from medusa_jax.native import begin_loading

    if use_compilation_cache():
        begin_loading()


def check(flags: Flags) -> None:
    """Refuse impossible combinations and missing files."""
    if flags.raw and flags.chat is not None:
        raise UserError("--raw continues text and --chat answers turns: give one of them")
    prompts = flags.prompt, flags.prompts_file, flags.prefix_file
    n_prompts = sum(prompt is not None for prompt in prompts)
    if flags.prefix_file is not None and flags.chat is not None:
        raise UserError(
            "--prefix_file continues a file and --chat answers turns: give one of them"
        )
    if flags.suffix_file is not None and flags.prefix_file is None:
        raise UserError("--suffix_file needs a --prefix_file, which may be empty")
    may_talk = flags.chat is not None or (flags.model is not None and not flags.raw)
    if n_prompts > 1 or (n_prompts == 0 and not may_talk):
        raise UserError(NOTHING_ASKED)
    if flags.logprobs is not None and not (flags.json or flags.prompts_file):
        raise UserError("--logprobs is shown in JSON only: give --json or --prompts_file")
    if flags.save_drafts and (flags.json or flags.prompt is None):
        raise UserError("--save_drafts draws one text as it is shown: give --prompt alone")
    if flags.save_drafts:
        file_to_write(flags.save_drafts, "--save_drafts")
    for file in (flags.prompts_file, flags.prefix_file, flags.suffix_file):
        if file is not None:
            open(file).close()


main = CommandLine("medusa decode", Flags, run, EXAMPLES)
