"""One step of training, tried on this machine before the real run."""
