"""Processes of a run, several runs at once, and the same bits whatever their number."""
