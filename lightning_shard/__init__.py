"""FSDP2 and spatial domain decomposition for PyTorch Lightning, by changing one argument."""
