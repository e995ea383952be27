"""``hyptree bench tokens``; run.py is where it starts."""
