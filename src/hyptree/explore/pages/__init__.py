"""Pages, one file each: HTML that needs nothing else."""
