"""Whether a sentencepiece model is whole: a file cut off between two pieces would still load."""

from medusa_jax.errors import UserError

# Fields of sentencepiece's ModelProto, in the order that they are written in.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
LENGTH_DELIMITED = 2


def check_whole(path: str) -> None:
    """Walk the fields of the outermost message, nothing inside them.

    Raises:
      UserError: it cannot be read, breaks off or lacks what follows the pieces.
    """
    try:
        with open(path, "rb") as f:
            data = f.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not data.startswith(b"\n"):
        return  # not even the tag of a first piece: another library's file, or none
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
    """A number in seven bits a byte, and where it ends; past the end counts as 0."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 or shift > 63:
            break
    return value, at
