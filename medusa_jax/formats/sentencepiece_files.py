"""Check that a sentencepiece model is complete: a file cut off between two pieces would still load."""

from medusa_jax.errors import UserError

# Fields of sentencepiece's ModelProto, in file order.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
LENGTH_DELIMITED = 2


def check_whole(path: str) -> None:
    """Check the fields of the outermost message.

    Raises:
      UserError: the file is unreadable, truncated or lacks the fields after the pieces.
    """
    try:
        with open(path, "rb") as f:
            data = f.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not data.startswith(b"\n"):
        return  # not a sentencepiece file
    at, seen = 0, set()
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 != LENGTH_DELIMITED:
            raise UserError(f"{path} cannot be read: a damaged sentencepiece model")
        size, at = _varint(data, at)
        at += size
        seen.add(tag >> 3)
    if at != len(data) or not {PIECES, TRAINER, NORMALIZER} <= seen:
        raise UserError(
            f"{path} is cut short: the end of the sentencepiece model is missing"
        )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint (seven bits per byte) and its end; bytes past the end count as 0."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 or shift > 63:
            break
    return value, at
