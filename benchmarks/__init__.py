"""Benchmarks: ours beside its rivals, the Euclidean twin and the floor, in one run, accuracy beside the time.

``hyptree bench geometry``, from a checkout; not in the wheel.
"""
