"""Nodes of Ray clusters on this machine, however busy it is."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def started(start: Callable[[], T], attempts: int = 5) -> T:
    """Return what `start` makes of Ray's nodes.

    Ray gives up a node that is not there within 30 s (`ray._private.node`), which a machine with
    ten busy processes for each processor reached; such a node is started anew.
    """
    for left in reversed(range(attempts)):
        try:
            return start()
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
    raise AssertionError
