"""What a profile of a few training steps is made of."""
