"""Giving freed memory back to the system while a model is taken apart and put together."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trimmer() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


def release() -> None:
    """Hand free pages back, where the C library can (glibc).

    A blocked weight does not fit the hole that the dense one leaves, because it is aligned to a
    page: without this, a 1.1 B model ends 830 MiB larger after transform and reverse.
    """
    trim = _trimmer()
    if trim is not None:
        trim(0)
