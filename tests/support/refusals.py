"""What a user reads in place of a stack trace."""

import contextlib
from collections.abc import Iterator

import pytest

from medusa_jax.errors import UserError


@contextlib.contextmanager
def refused(
    match: str, kind: type[UserError] = UserError
) -> Iterator[pytest.ExceptionInfo]:
    """The block ends with an error of one line, in which `match` is found."""
    with pytest.raises(kind, match=match) as error:
        yield error
    assert "\n" not in str(error.value)
