"""Makes the trace and the table of a profile of a few training steps."""
