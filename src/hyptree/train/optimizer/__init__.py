"""The optimiser of a run, its learning rate and the average of its weights."""
