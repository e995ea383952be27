"""The kinds of adapter, one file each."""
