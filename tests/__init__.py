"""The tests, by room of the package."""

from importlib.metadata import version

REFERENCES = "SHARD_TESTS_REFERENCES"  # the variable with the folder of a session's references
OLDEST = version("torch").startswith("2.11.")  # what later versions of torch have is not tested
