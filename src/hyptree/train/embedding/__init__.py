"""Embedding a hierarchy into a space: its loop, its batches, what it minimises."""
