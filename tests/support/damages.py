"""What can happen to a file: by name, what does it to the file of a path."""

import os

import numpy as np


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def as_array(change):
    """A damage to the array that a file holds."""
    return lambda path: np.save(path, change(np.load(path)))


# Any file's.
DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": flipped,
    "overwritten": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
}
# A NumPy file's.
ARRAY_DAMAGES = DAMAGES | {
    "archive": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(60)),
    "rows zeroed": as_array(np.zeros_like),
    "row less": as_array(lambda x: x[:-1]),
    "another type": as_array(lambda x: x.astype(np.float64)),
    "another rank": as_array(lambda x: x[None]),
}
