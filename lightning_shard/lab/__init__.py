"""Tries one step of training on this machine before the real run."""
