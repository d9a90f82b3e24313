"""Microsoft's Aurora, fine-tuned on fields of the weather by a roll-out of several steps."""
