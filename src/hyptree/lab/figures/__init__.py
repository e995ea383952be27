"""Figures of the lab: as data first, then drawn."""
