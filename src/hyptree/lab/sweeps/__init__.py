"""Sweeps of toy models: the grid, the folder that resumes, its tables."""
