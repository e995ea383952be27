"""Training: loops, objectives and checkpoints. Nothing heavy is imported before it is used."""
