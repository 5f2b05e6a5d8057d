"""What is decided once a process: how many devices there are, and where programs are kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAYERS = (0, 1)
COLUMNS = ("mlp.gate_proj", "mlp.up_proj", *(f"self_attn.{one}_proj" for one in "qkv"))
ROWS = ("mlp.down_proj", "self_attn.o_proj")

CACHED = """
import sys, torch, torch_xla
import torch_xla.debug.metrics as metrics
from optimus.generation import xla_cache
place = xla_cache(sys.argv[1])
assert xla_cache(sys.argv[1]) == place
(torch.ones(3, device="xla") + 1).cpu()
try:
    xla_cache(sys.argv[1] + "/other")
except RuntimeError as error:
    print(error)
print(place)
print({name for name in metrics.counter_names() if name.startswith("Persistent")})
"""


def _run(*arguments, **more):
    paths = os.pathsep.join(str(path) for path in (HERE.parents[1], HERE.parent, HERE))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sharded():
    """What four devices say."""
    return json.loads(_run(str(HERE / "sharded.py"), CPU_NUM_DEVICES="4"))


def test_layers_are_split(sharded):
    """The layers of transformers' own plan, and nothing else; whole again after the reverse."""
    names = [f"model.layers.{n}.{part}.weight" for n in LAYERS for part in (*COLUMNS, *ROWS)]
    assert sharded["devices"] == 4
    assert sharded["auto"]["passes"] == ["xla.sharding", "static.xla"]
    assert sharded["auto"]["split"] == sorted([*names, "lm_head.weight"])
    assert sharded["auto"]["after"] == sharded["int8"]["after"] == []
    assert sharded["auto"]["same"] is sharded["int8"]["same"] is True


def test_tokens_of_four_devices(sharded, report):
    """Stock's tokens, in static shapes, and no program compiled after the warm-up."""
    count = sharded["auto"]["compiled"]
    report(f"4 devices: {len(sharded['stock'])} tokens, {count} programs compiled after warm-up")
    assert sharded["auto"]["tokens"] == sharded["stock"]
    assert (count, sharded["int8"]["compiled"]) == (0, 0)


def test_codes_are_split(sharded):
    """Rounded weights are as the dense ones were."""
    by_row, by_column = "{devices=[4,1]0,1,2,3}", "{devices=[1,4]0,1,2,3}"
    assert sorted(sharded["int8"]["split"]) == sorted([by_row] * 11 + [by_column] * 4)


def test_programs_are_kept(tmp_path):
    """In a folder for this torch_xla; asked for too late, or elsewhere, it says so."""
    first, second = (_run("-c", CACHED, str(tmp_path)).splitlines() for _ in range(2))
    assert "Call xla_cache before anything is computed" in first[0]
    assert list(Path(first[1]).iterdir()) != []
    # XLA's CPU device writes programs and cannot read them; a TPU can.
    assert "PersistentCacheMiss" in first[2]
    assert "PersistentCacheHit" in second[2] or "PersistentCacheDeserializeFailure" in second[2]
