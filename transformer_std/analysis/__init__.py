"""What one asks of a model and of the values of a run."""
