"""Shards parameters, gradients and optimizer states over all ranks by FSDP2."""
