"""Intel GPUs in Lightning."""
