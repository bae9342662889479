"""How the suites say that a promise is broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ContractError", "refused", "require"]


class ContractError(AssertionError):
    """A layer, a model or a communicator does not keep its contract; the message says what was found and is due."""


def require(kept: object, message: str) -> None:
    """Raise ContractError with the message unless ``kept``."""
    if not kept:
        raise ContractError(message)


@contextmanager
def refused(kind: type[Exception], pattern: str) -> Iterator[None]:
    """Expect the ``with`` block to raise an error of the kind whose message matches.

    Raises:
        ContractError: nothing was raised, or it says something else.
    """
    try:
        yield
    except kind as error:
        if not re.search(pattern, str(error)):
            raise ContractError(f"the message {str(error)!r} does not say {pattern!r}") from error
    else:
        raise ContractError(f"nothing was raised where a {kind.__name__} that says {pattern!r} is due")
