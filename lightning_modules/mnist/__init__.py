"""PyTorch's MNIST example."""
