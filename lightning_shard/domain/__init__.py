"""Which rank owns which rows of a field, and how rows travel, with adjoints."""
