"""`python -m lightning_shard calibrate` measures this machine for `plan --cluster`."""

import argparse
import sys

from lightning_shard.cli.help import PROGRAM
from lightning_shard.cli.usage import as_usage_error, is_first_rank
from lightning_shard.lab import calibrate as measuring


def calibrate(options: argparse.Namespace) -> None:
    """Print what was measured, and write it.

    Raises:
        UsageError: There are fewer devices than ranks, or a launcher has started others.
    """
    with as_usage_error(ValueError, RuntimeError):
        found = measuring.calibrate(options.processes, options.device)
    if is_first_rank():
        found.save(options.output)
        print(measuring.table_of_rates(found))
        print(f"written to {options.output}, for {PROGRAM} plan --cluster", file=sys.stderr)
