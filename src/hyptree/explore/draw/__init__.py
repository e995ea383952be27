"""One way to draw each figure."""
