"""``hyptree bench geometry``; run.py is where it starts."""
