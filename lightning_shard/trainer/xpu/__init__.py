"""Makes Intel GPUs usable in Lightning."""
