"""Runs many ranks in one process, one at a time."""
