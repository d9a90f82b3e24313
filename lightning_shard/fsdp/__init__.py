"""Parameters, gradients and optimizer states sharded over all ranks by FSDP2."""
