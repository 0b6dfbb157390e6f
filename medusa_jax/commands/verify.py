"""`medusa verify`: whether draft heads answer as their certificate records (`evaluate/certificate.py`)."""

import dataclasses
import os

from medusa_jax.commands.flags import CommandLine, flag
from medusa_jax.console import inform
from medusa_jax.errors import UserError

EXAMPLES = """examples:
  medusa verify --model path/to/model --drafter path/to/heads
  medusa verify --model path/to/model --drafter published/heads --write
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Replay the certificate of draft heads: exit status 1 if they do not fit it."""

    model: str | None = flag("directory or hub id of their model (default: the demo)", None)
    drafter: str = flag("heads: a name, a directory, a file or a hub id")
    write: bool = flag("record a certificate instead", False)


def run(flags: Flags) -> int:
    from medusa_jax.api import find_heads
    from medusa_jax.evaluate import certificate
    from medusa_jax.evaluate.tables import markdown_table

    stored = find_heads(flags.model, flags.drafter)
    if stored is None:
        raise UserError("give --drafter the heads to verify")
    if flags.write:
        certify(flags.model, flags.drafter, stored.directory)
        return 0
    recorded = certificate.read(stored.directory)
    model = certificate.open_plain(flags.model, flags.drafter)
    rows, causes = [], []
    for what, difference, limit, cause in certificate.compare(recorded, model):
        verdict = "fits" if difference <= limit else "does not fit"
        rows.append((what, f"{difference:.1e}", f"{limit:.0e}", verdict))
        causes += [] if difference <= limit else [cause]
    print(markdown_table(("compared", "largest difference", "limit", ""), rows))
    if (other := recorded.facts["model"]) != model.fingerprint:
        inform(f"recorded with the model {other}, this is {model.fingerprint}")
    if causes:
        inform(f"the heads in {stored.directory} do not fit: {causes[0]}")
    return int(bool(causes))


def certify(model: str | None, drafter: str, out: str, dtype: str = "") -> None:
    """Record heads in their directory or, rounded to `dtype`, their export's; a `UserError` if it has a certificate."""
    from medusa_jax.evaluate import certificate
    from medusa_jax.files.layouts.native_heads import CERTIFICATE

    if os.path.exists(file := os.path.join(out, CERTIFICATE)):
        raise UserError(f"{file} exists: delete it to record another")
    opened = certificate.open_plain(model, drafter)
    recorded = certificate.record(certificate.rounded(opened, dtype) if dtype else opened)
    inform(f"wrote {certificate.write(out, recorded)}")


main = CommandLine("medusa verify", Flags, run, EXAMPLES)
