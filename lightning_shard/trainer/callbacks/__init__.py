"""Callbacks: predictions, samples per second, times on the device."""
