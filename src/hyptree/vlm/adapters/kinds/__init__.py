"""The kinds of adapter."""
