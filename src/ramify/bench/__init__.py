"""Benchmarks: ours beside its rivals, the Euclidean twin and the floor, in one run, accuracy beside the time.

``ramify bench geometry``, or ``python -m ramify.bench.geometry`` where only torch is installed.
"""
