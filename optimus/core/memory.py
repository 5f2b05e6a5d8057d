"""Giving freed memory back to the system while a model is taken apart and put together."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

# Linux's advice to write pages back and drop them; unlike MADV_DONTNEED it never loses a byte.
PAGE_OUT = 21


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    return found


def release() -> None:
    """Hand free pages back, where the C library can (glibc).

    A blocked weight does not fit the hole that the dense one leaves, because it is aligned to a
    page: without this, a 1.1 B model ends 830 MiB larger after transform and reverse.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def evict(tensor: Tensor) -> None:
    """Let the pages of a weight go that is not read any more, while its file stays mapped.

    transformers maps a checkpoint as a whole, so that the smallest parameter left holds the pages
    of all that were read. Whoever does read them again gets them back from the file.
    """
    advise = _function("madvise")
    if advise is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes - start) // page * page
    if length > 0:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(length), PAGE_OUT)
