"""How large tiny is. The environment can ask for more, for benchmarks at real head sizes."""

from __future__ import annotations

import math
import os

LENGTH = int(os.environ.get("ZOO_LENGTH", "9"))
WIDTH = int(os.environ.get("ZOO_WIDTH", "64"))
HEADS = int(os.environ.get("ZOO_HEADS", "4"))
HEAD = WIDTH // HEADS
TINY_POSITIONS = 64
POSITIONS = max(TINY_POSITIONS, 2 * LENGTH)
# Images of patches of 16 by 16, about as many as there are words.
IMAGE = max(64, 16 * round(math.sqrt(LENGTH)))
# Swin's windows are 7 or 8 wide; at tiny sizes there must be more than one of them.
WINDOW = 2 if LENGTH < 32 else 8
# Windows and blocks are no wider than the models' own, and at tiny sizes leave something out.
SPAN = 4 if LENGTH < 32 else min(512, LENGTH // 2)
BLOCK, RANDOM = (1, 1) if LENGTH < 32 else (64, 3)
FRAMES, SAMPLES = 8 * LENGTH, 640 * LENGTH
