"""``hyptree bench vlm``; run.py is where it starts."""
