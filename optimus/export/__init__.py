"""Checkpoints out and in: convert a folder, give the original back, load what was written."""
