"""Changes to the whole model: one file per backend, and what several share."""
