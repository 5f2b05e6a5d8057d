"""What is swapped: one file per architecture; files with a leading underscore are shared."""
