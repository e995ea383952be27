"""``hyptree bench hcformer``; run.py is where it starts."""
