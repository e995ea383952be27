"""Superposition lab: why loss falls as one over width. Toy-model sweeps, metrics, theory and fits.

Importing this package needs no torch; :mod:`ramify.lab.engine` does.
"""
