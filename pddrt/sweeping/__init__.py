"""One scenario over a grid of values."""
