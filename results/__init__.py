"""What writes the tables of docs/RESULTS.md; not in the wheel."""
