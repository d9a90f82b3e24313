"""Batches: finding their fields, and splitting each over the ranks of the domain."""
