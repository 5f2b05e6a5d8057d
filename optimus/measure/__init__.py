"""Timing side by side: real text in, seconds, memory and error out."""
