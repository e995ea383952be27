"""``hyptree bench helm``; run.py is where it starts."""
