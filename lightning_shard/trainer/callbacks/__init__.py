"""Offers callbacks: predictions, reports, samples per second, times on the device."""
