"""Output layers of real language models: found in checkpoints, read by rows, measured."""
