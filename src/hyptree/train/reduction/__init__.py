"""``hyptree reduce``: a classifier measured with fewer tokens."""
