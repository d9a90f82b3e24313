"""The command line: `python -m lightning_shard fit|validate|test|predict --config a.yaml`.

`python -m lightning_shard ops` prints the table of functions, `export CKPT OUT` writes a checkpoint
as one file for other programs, `inspect CKPT` shows what is in it. `check` and `plan` take the
options of `fit` and rehearse one training step: is it exact on several ranks, what will each hold?

Lightning's own command line with this package's strategy as the default, an optimizer made after
sharding, and errors of one sentence. A mistake in what was typed exits with 2; a refusal by a
module, a data module or the strategy before the first batch with 1; later errors keep their
traceback. `LIGHTNING_SHARD_TRACEBACK=1` shows the traceback of a refusal too.
"""

import argparse
import importlib
import importlib.util
import os
import re
import signal
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_shard.cli.checks import check
from lightning_shard.cli.defaults import find_intel_gpu, own_defaults
from lightning_shard.cli.errors import diagnose
from lightning_shard.cli.export import export
from lightning_shard.cli.inspect import inspect
from lightning_shard.cli.operations import report
from lightning_shard.cli.rehearse import COMMANDS, rehearse, wanted, words_of_fit
from lightning_shard.cli.report import exit_with, is_first_rank, origin
from lightning_shard.cli.sources import (
    ENV_PREFIX,
    Tree,
    UsageError,
    read_sources,
    split_subcommand,
)
from lightning_shard.progress import SamplesPerSecond
from lightning_shard.sharded_directory import REST
from lightning_shard.strategy import HybridShardStrategy
from lightning_shard.weight_files import read_torch_file

REFUSALS = (ValueError, OSError, NotImplementedError, MisconfigurationException)


class SaveConfig(SaveConfigCallback):
    """Save the resolved configuration in the log directory and beside the checkpoints."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write beside the checkpoints and hand the options to the loggers as hyperparameters."""
        if stage != "fit":
            return
        text = self.parser.dump(self.config, skip_none=False, format="yaml")
        for callback in trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            if folder and "://" not in str(folder):
                Path(folder).mkdir(parents=True, exist_ok=True)
                (Path(folder) / self.config_filename).write_text(text, encoding="utf-8")
        options = yaml.safe_load(text)
        for logger in trainer.loggers:
            logger.log_hyperparams(
                {key: options[key] for key in ("trainer", "model", "data") if key in options}
            )


class RunState(Callback):
    """The last error while building, and whether batches flow: then errors keep their traceback."""

    def __init__(self) -> None:
        self.running = False
        self.error: Exception | None = None
        self.trainer: Trainer | None = None

    def stop_children(self) -> None:
        """Stop the ranks launched from here, which would report the same refusal once more."""
        launcher = self.trainer.strategy.launcher if self.trainer else None
        if launcher:
            launcher.kill(signal.SIGKILL)

    def build(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        """Build for the parser, and keep the error that it would replace by its own."""
        try:
            return class_type(*args, **kwargs)
        except Exception as err:
            self.error = err
            raise

    def _run(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.running = True

    on_sanity_check_start = on_train_start = on_validation_start = _run
    on_test_start = on_predict_start = _run


class ShardCLI(LightningCLI):
    """LightningCLI for any module and data module, with checks before anything is built.

    Args:
        args: The words of the command line.
        state: Told when batches begin to flow.
        only_build: Whether to build model, data and trainer, and to run nothing.
    """

    def __init__(self, args: Sequence[str], state: RunState, *, only_build: bool = False) -> None:
        self.given, self.state, self.only_build = Tree(), state, only_build
        names = tuple(self.subcommands())
        options = {
            "default_env": True,
            "env_prefix": ENV_PREFIX,
            "exit_on_error": False,
            "allow_abbrev": False,
        }
        command = Path(sys.argv[0]).name
        prog = command if command == "lightning-shard" else "python -m lightning_shard"
        super().__init__(
            LightningModule,
            LightningDataModule,
            args=list(args),
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=42,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "strategy": {"class_path": "lightning_shard.HybridShardStrategy"},
                "callbacks": [state, SamplesPerSecond()],
            },
            parser_kwargs={"prog": prog, **options, **{name: dict(options) for name in names}},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options that are ours."""
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=False,
            help="Run the test loaders on the final weights when fit ends (only fit uses it).",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the sources, parse, and check the result; every mistake becomes a UsageError."""
        split = split_subcommand(args, tuple(self.subcommands()))
        if split:
            self.given = read_sources(split[1], split[0])
        try:
            self.config = parser.parse_args(args)
        except argparse.ArgumentError as err:
            if split is None:
                raise UsageError(str(err)) from err
            defaults = self._parser(split[0]).get_defaults()
            known = {key.split(".")[0] for key in defaults.keys(branches=True)}
            raise diagnose(self.given, known, str(err), split[0]) from err
        if split:
            config = self.config[split[0]]
            find_intel_gpu(config.trainer)
            own_defaults(config, self.given, self._parser(split[0]))
            check(config, self.given)

    def _parse_ckpt_path(self) -> None:
        """Say which given values the hyperparameters in a checkpoint replace."""
        before = dict(self._model_options())
        command = str(self.config.get("subcommand"))
        options = self.config.get(command) or {}
        path = options.get("ckpt_path")
        file = hyperparameter_file(path, trusted=options.get("weights_only") is False)
        if file is None:
            return
        try:
            self.config[command]["ckpt_path"] = str(file)
            super()._parse_ckpt_path()
        except argparse.ArgumentError as err:
            raise UsageError(f"the hyperparameters in ckpt_path cannot be used: {err}") from err
        self.config[command]["ckpt_path"] = path
        for key, value in self._model_options():
            if key in before and before[key] != value and is_first_rank():
                note = f"note: {key} is {value} as in ckpt_path, not {before[key]}"
                print(note, file=sys.stderr)

    def _model_options(self) -> list[tuple[str, Any]]:
        config = self.config.get(str(self.config.get("subcommand")), self.config)
        return [(f"model.{key}", value) for key, value in config["model"].items()]

    def before_instantiate_classes(self) -> None:
        """Watch what is built for the trainer."""
        for base in (Strategy, Accelerator, Logger, Profiler, Callback):
            self.parser.add_instantiator(self.state.build, base)

    def after_instantiate_classes(self) -> None:
        """Let a refusal stop the processes that the trainer launches."""
        self.state.trainer = self.trainer
        if isinstance(self.trainer.strategy, HybridShardStrategy):
            options = vars(self.config[self.config["subcommand"]].as_flat())
            self.trainer.strategy.config = {
                key: re.sub(" at 0x[0-9a-f]+", "", str(value))  # of objects in this process
                for key, value in options.items()
                if key != "config"
            }

    def _run_subcommand(self, subcommand: str) -> None:
        if not self.only_build:
            super()._run_subcommand(subcommand)

    def before_fit(self) -> None:
        """Refuse before training what could only fail after it."""
        if self.config["fit"]["test_after_fit"] and not is_overridden("test_step", self.model):
            name = type(self.model).__name__
            raise UsageError(
                f"test_after_fit is true but {name} has no test_step; add one, or set it to false"
            )

    def after_fit(self) -> None:
        """Test the final weights if `test_after_fit` asks for it."""
        if self.config["fit"]["test_after_fit"]:
            self.trainer.test(self.model, datamodule=self.datamodule)


def hyperparameter_file(path: str | None, *, trusted: bool) -> Path | None:
    """Where a checkpoint keeps hyperparameters that can be read without running code of it.

    Args:
        path: The option ckpt_path.
        trusted: Whether weights_only is false; then hyperparameters that are objects are left out.

    Raises:
        UsageError: The file cannot be read.
    """
    file = Path(path or "")
    file = file / REST if file.is_dir() else file
    if not zipfile.is_zipfile(file):
        return None  # of "last" and "best", or of another format, which holds weights alone
    try:
        read_torch_file(file)
    except ValueError as err:
        if trusted:
            return None
        raise UsageError(str(err).rstrip(".")) from err
    return file


def main(args: Sequence[str] | None = None) -> None:
    """Run one subcommand.

    Args:
        args: The words of the command line; those of the process if None.
    """
    args = sys.argv[1:] if args is None else args
    if args[:1] == ["ops"]:
        return report(args[1:])
    if args[:1] in (["export"], ["inspect"]):
        try:
            return (export if args[0] == "export" else inspect)(args[1:])
        except UsageError as err:
            exit_with(err, code=2)
    state = RunState()
    # lightning 2.6 and this file say skip_none, renamed to skip_unset in recent jsonargparse
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    # lightning 2.6 asks for a class that torch 2.13 deprecates
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    try:
        _import_names()
        if args[:1] and args[0] in COMMANDS:
            asked = wanted(args[1:])
            built = ShardCLI(words_of_fit(args[1:]), state, only_build=True)
            rehearse(args[0], built.model, built.datamodule, asked)
        else:
            ShardCLI(args, state)
    except UsageError as err:
        exit_with(err, code=2)
    except Exception as wrapped:
        err = origin(wrapped, state.error)
        refused = isinstance(err, REFUSALS) and not state.running
        if not refused or os.environ.get(f"{ENV_PREFIX}_TRACEBACK"):
            raise err from err.__cause__
        state.stop_children()
        exit_with(err, code=1)


def _import_names() -> None:
    """Import the classes that a config may name by their short names."""
    if importlib.util.find_spec("lightning_modules"):
        importlib.import_module("lightning_modules")
