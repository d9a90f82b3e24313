"""Keeps Lightning's contracts: the strategy, its batches, steps and callbacks."""
