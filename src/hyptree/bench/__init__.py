"""Benchmarks: ours beside its rivals, the Euclidean twin and the floor, in one run, accuracy beside the time.

``hyptree bench geometry``, or ``python -m hyptree.bench.geometry`` where only torch is installed.
"""
