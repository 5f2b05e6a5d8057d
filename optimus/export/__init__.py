"""Models out: checkpoints and graphs that others read, and checkpoints back in."""
