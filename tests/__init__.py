"""The tests, by room of the package."""

REFERENCES = "SHARD_TESTS_REFERENCES"  # the variable with the folder of a session's references
