"""``hyptree bench kernels``; run.py is where it starts."""
