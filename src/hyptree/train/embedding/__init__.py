"""Embedding a hierarchy into a space: its batches, where points start, what is minimised (the task ``embed``)."""
