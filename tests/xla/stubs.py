"""Empty CUDA libraries, so that the CUDA wheel of torch imports where no NVIDIA wheel is installed.

torch_xla has no wheel for a CPU build of torch, and torch's default wheel is the CUDA one:
its own libraries ask the loader for fourteen of NVIDIA's, some 3 GB that nothing here would call.
Each is made here with the name, the symbols and the symbol versions that torch asks for, by the C
compiler, and laid beside torch's own. Every function answers "no device". For tests only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

VENDOR = re.compile(r"Shared library: \[(lib(?:cu|nv|nccl)[^\]]*)\]")
# Which library has a symbol that has no version; the first prefix that fits decides.
PREFIXES = (
    ("cusparseLt", "libcusparseLt"),
    ("cuFile", "libcufile"),
    ("nccl", "libnccl"),
    ("pncc", "libnccl"),
    ("curand", "libcurand"),
    ("cublasLt", "libcublasLt"),
    ("cublas", "libcublas"),
    ("nvrtc", "libnvrtc"),
    ("cupti", "libcupti"),
    ("cudnn", "libcudnn"),
    ("cusolver", "libcusolver"),
    ("cusparse", "libcusparse"),
    ("cufft", "libcufft"),
    ("nvshmem", "libnvshmem_host"),
    ("cuda", "libcudart"),
    ("__cuda", "libcudart"),
)
NO_DEVICE = 100
# What torch calls while it is imported, and believes.
SPECIAL = {
    "__cudaRegisterFatBinary": "void **{}(void *p) {{ static void *h; return &h; }}",
    "cudaGetErrorString": 'const char *{}(int e) {{ return "no device: a stub"; }}',
    "cudaGetErrorName": 'const char *{}(int e) {{ return "cudaErrorNoDevice"; }}',
    "cudaGetDeviceCount": f"int {{}}(int *n) {{{{ *n = 0; return {NO_DEVICE}; }}}}",
    "cudaGetLastError": "int {}(void) {{ return 0; }}",
    "cudaPeekAtLastError": "int {}(void) {{ return 0; }}",
    "cudaRuntimeGetVersion": "int {}(int *v) {{ *v = 12080; return 0; }}",
    "cudaDriverGetVersion": "int {}(int *v) {{ *v = 0; return 0; }}",
}

Symbols = dict[str, str]


def _read(library: Path, *what: str) -> str:
    command = ["readelf", "--wide", *what, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(libraries: list[Path]) -> set[str]:
    """The names of NVIDIA's libraries that the loader will look for."""
    return {name for one in libraries for name in VENDOR.findall(_read(one, "--dynamic"))}


def undefined(libraries: list[Path]) -> Symbols:
    """Symbols that somebody else must define, with the version asked for, or ""."""
    found: Symbols = {}
    for library in libraries:
        for line in _read(library, "--dyn-syms").splitlines():
            fields = line.split()
            if len(fields) >= 8 and fields[6] == "UND":
                symbol, _, version = fields[7].partition("@")
                found[symbol] = version.lstrip("@")
    return found


def owner(symbol: str, version: str, names: set[str]) -> str | None:
    """The library of ``names`` that has the symbol; None if it is not NVIDIA's."""
    if version in names:
        return version
    stem = next((stem for prefix, stem in PREFIXES if symbol.startswith(prefix)), None)
    return next((name for name in names if stem and name.startswith(f"{stem}.so")), None)


def _function(symbol: str) -> str:
    plain = "void {}(void) {{}}" if symbol.startswith("__cuda") else None
    template = SPECIAL.get(symbol) or plain or f"int {{}}(void) {{{{ return {NO_DEVICE}; }}}}"
    return template.format(symbol)


def _versions(symbols: Symbols) -> Iterator[str]:
    grouped = defaultdict(list)
    for symbol, version in symbols.items():
        grouped[version].append(symbol)
    grouped.pop("", None)
    for version, members in sorted(grouped.items()):
        yield f"{version} {{ global: {'; '.join(sorted(members))}; }};"


def build(name: str, symbols: Symbols, folder: Path) -> None:
    """Compile one library into ``folder``."""
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        lines = ["static int keep;", *map(_function, sorted(symbols))]
        source.write_text("\n".join(lines))
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        if versions := list(_versions(symbols)):
            script.write_text("\n".join(versions))
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, "-o", str(folder / name), str(source)], check=True)


def main() -> None:
    """Lay the stubs beside the libraries of the torch of this very Python."""
    torch = Path(sysconfig.get_path("purelib"), "torch")
    folder = torch / "lib"
    libraries = [*folder.glob("*.so"), *torch.glob("_C*.so")]
    # It is loaded on demand only, by what compiles for CUDA.
    libraries = [one for one in libraries if one.name != "libcaffe2_nvrtc.so"]
    names = needed(libraries)
    symbols: dict[str, Symbols] = {name: {} for name in sorted(names)}
    for symbol, version in undefined(libraries).items():
        if name := owner(symbol, version, names):
            symbols[name][symbol] = version
    for name, mine in symbols.items():
        build(name, mine, folder)
        sys.stdout.write(f"{name}: {len(mine)} symbols\n")


if __name__ == "__main__":
    main()
