"""Says which rank owns which rows of a field, and moves rows between ranks, with adjoints."""
