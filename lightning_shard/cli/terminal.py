"""Chooses what a run prints on a terminal before and beside our own lines.

Lightning's lines that say nothing of this run are left out. Its warnings stay, but for two: the
advice to install a logger, and that of torch on a class that Lightning itself uses.
"""

import logging
import shutil
import sys
import warnings
from typing import Any

from lightning_shard.lightning import RichProgressBar, TQDMProgressBar, Trainer
from lightning_shard.trainer.host import callbacks_of

WIDE = 120  # columns in which rich's bar has room for a few metrics
_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero", "pytorch_lightning.utilities.rank_zero",
    "lightning.fabric.utilities.seed", "lightning_fabric.utilities.seed",
)  # fmt: skip
_SAYS_NOTHING = (
    "Tip: For seamless",  # on other products
    "Seed set to",  # once for each rank; config.yaml has it
    "GPU available: False", "TPU available: False",  # a device that is not used has a warning
)  # fmt: skip
_WARNINGS = (".*LeafSpec.*", "Starting from v1.9.0, `tensorboardX`")
_OF_TRAINING = "The dirpath has changed"  # and a ModelCheckpoint forgets older files: in fit alone


def leave_out_chatter(command: str) -> None:
    """Let Lightning print what says something of this run.

    Args:
        command: The subcommand that runs.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(says_something)
    for words in (*_WARNINGS, *(() if command == "fit" else (_OF_TRAINING,))):
        warnings.filterwarnings("ignore", words)


def says_something(record: logging.LogRecord) -> bool:
    """Return False for a line that would be the same in any run."""
    return not any(words in record.getMessage() for words in _SAYS_NOTHING)


def fit_bar(trainer: Trainer, callbacks: Any) -> None:
    """Replace a bar that Lightning has chosen by one that fits on one line.

    rich's bar wraps on a narrow terminal, and in a file, which it takes for one of 80 columns.

    Args:
        trainer: It has the callbacks, which are changed.
        callbacks: The configuration names these.
    """
    named = callbacks if isinstance(callbacks, list) else [callbacks]  # one stands alone
    chosen = any("ProgressBar" in str(each.get("class_path")) for each in named if each)
    for place, bar in enumerate(callbacks_of(trainer)):
        if type(bar) is not RichProgressBar or chosen:
            continue
        if not sys.stdout.isatty():
            callbacks_of(trainer)[place] = RichProgressBar(console_kwargs={"width": 2 * WIDE})
        elif shutil.get_terminal_size().columns < WIDE:
            callbacks_of(trainer)[place] = TQDMProgressBar()
