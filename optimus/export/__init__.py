"""Models out: what other programs read and run."""
