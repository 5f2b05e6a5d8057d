"""Pure tensor functions. Imports torch alone."""
