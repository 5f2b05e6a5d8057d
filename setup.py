"""The compiled kernels, which are optional: without a C compiler the package installs all the same.

They are loaded by ctypes, know nothing of Python and torch, and need neither to be built.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup

PARTS = (
    *("threads", "quantized", "portable", "vnni", "bf16", "rounding"),
    *("layer", "decoder", "attention", "activation"),
)
HEADERS = [
    *("threads.h", "vectors.h", "curves.h", "quantized.h", "bf16.h", "round_row.h"),
    *("layer.h", "attention.h", "activation.h"),
]
# No contraction: torch, which rounds the same weights where nothing is compiled, has none.
UNIX = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0"]

setup(
    ext_modules=[
        Extension(
            "optimus.native._kernels",
            sources=[f"optimus/native/{name}.c" for name in PARTS],
            depends=[f"optimus/native/{name}" for name in HEADERS],
            libraries=[] if sys.platform == "win32" else ["m"],
            extra_compile_args=[] if sys.platform == "win32" else UNIX,
            optional=True,
        )
    ]
)
