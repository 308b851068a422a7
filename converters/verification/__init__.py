"""Our model against transformers' own, and two checkpoints against each other."""
