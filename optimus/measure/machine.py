"""What a figure was measured on: a time without its machine, threads and allocator says nothing."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path

import torch

from optimus.core import backend

PACKAGES = ("optimus", "torch", "transformers", "accelerate", "safetensors")

# The flags that decide which kernels oneDNN picks, as /proc/cpuinfo spells them on x86 and ARM.
ISA = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip


def _read(path: str) -> str:
    """The text of a /proc file; empty where the system has none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _field(text: str, *names: str) -> str:
    """The value of the first ``name : value`` line."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


def processor() -> str:
    """The processor's own name, or the machine type where it tells none."""
    return backend.processor()


def isa() -> tuple[str, ...]:
    """The instruction sets of this processor that matter here."""
    flags = _field(_read("/proc/cpuinfo"), "flags", "Features").split()
    return tuple(flag for flag in ISA if flag in flags)


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def allocator() -> str:
    """The ``malloc`` mapped into this process; a preloaded one hides the C library's."""
    maps = _read("/proc/self/maps")
    known = (name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in maps)
    return next(known, platform.libc_ver()[0] or "system")


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _status_bytes(field: str) -> int:
    value = _field(_read("/proc/self/status"), field)
    return int(value.split()[0]) * 1024 if value else 0


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where the system does not say."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most it ever had in RAM.

    VmHWM first: on Linux ``ru_maxrss`` starts from the parent's figure.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return _status_bytes("VmHWM") or own


def version(package: str) -> str:
    """The installed version of a package, or that it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def describe() -> dict[str, object]:
    """All of it, as JSON-able data."""
    return {
        "processor": processor(),
        "machine": platform.machine(),
        "isa": list(isa()),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "memory_bytes": memory_bytes(),
        "allocator": allocator(),
        "versions": versions(),
    }
