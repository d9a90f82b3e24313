"""Lightning's command line with our strategy, and errors of one sentence.

The optimizer is made after sharding. A mistake in what was typed exits with 2. Any other error
until the first batch is done exits with 1, and those after it keep their traceback.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from lightning_shard.checkpoint.open import hyperparameters
from lightning_shard.cli.config_checks import (
    check,
    check_numbers,
    in_own_home,
    strategy_options,
)
from lightning_shard.cli.defaults import check_model, fill_in
from lightning_shard.cli.help import OPTIONS, PROGRAM
from lightning_shard.cli.messages import Parser, RefusalError, explain, import_short_names
from lightning_shard.cli.positions import Given, check_variables
from lightning_shard.cli.run_state import RunState, words_of_a_failure, words_of_an_interrupt
from lightning_shard.cli.terminal import fit_bar, leave_out_chatter
from lightning_shard.cli.tiles import TYPES, builder, check_output, check_tiles
from lightning_shard.cli.usage import (
    ENV_PREFIX,
    UsageError,
    as_usage_error,
    exit_with,
    is_first_rank,
    note,
    origin,
    shows_traceback,
)
from lightning_shard.data.atomic import disk_errors, of_the_disk
from lightning_shard.lab.predict_in_tiles import predicting
from lightning_shard.lightning import (
    BasePredictionWriter,
    LightningArgumentParser,
    LightningCLI,
    LightningDataModule,
    LightningModule,
    SaveConfigCallback,
    Trainer,
    is_overridden,
)
from lightning_shard.trainer.asked_devices import meant
from lightning_shard.trainer.callbacks.predictions import PredictionWriter
from lightning_shard.trainer.callbacks.run_report import RunReport
from lightning_shard.trainer.callbacks.samples_per_second import SamplesPerSecond
from lightning_shard.trainer.callbacks.step_profile import StepProfile
from lightning_shard.trainer.host import add_once, callbacks_of
from lightning_shard.trainer.strategy import HybridShardStrategy

SWITCHES = {"test_after_fit": False, "profile": False, "report": True}  # defaults of `fit`


class SaveConfig(SaveConfigCallback):
    """Save the resolved configuration in the log directory and beside the checkpoints."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write both files.

        Raises:
            OSError: They cannot be written, for example on a full disk.
        """
        with disk_errors(Path(trainer.log_dir or "") / self.config_filename):
            super().setup(trainer, pl_module, stage)

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
        parts = {key: options[key] for key in ("trainer", "model", "data") if key in options}
        for logger in trainer.loggers:
            logger.log_hyperparams(parts)


class ShardCLI(LightningCLI):
    """LightningCLI for any module and data module, with checks before anything is built.

    Args:
        args: The words of the command line.
        state: Follows how far the run is.
    """

    def __init__(self, args: Sequence[str], state: RunState) -> None:
        self.state = state
        self.names = tuple(self.subcommands())
        if args and args[0] in self.names:  # the parsers of the others take a third of the time
            alone = {args[0]: self.subcommands()[args[0]]}
            self.subcommands = lambda: alone
        command = Path(sys.argv[0]).name
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
            parser_kwargs={"prog": command if command == "lightning-shard" else PROGRAM},
            parser_class=Parser,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make a parser that reads our variables, and raises its refusals."""
        own = {"default_env": True, "env_prefix": ENV_PREFIX}
        return super().init_parser(**own, exit_on_error=False, allow_abbrev=False, **kwargs)

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the options that LightningCLI does not have."""
        for name, (value, text) in OPTIONS.items():
            if name == "output" and "predict" not in self.subcommands():
                continue
            how: dict[str, Any] = {"type": bool, "nargs": "?", "const": True}
            if kind := {**TYPES, "output": str | None}.get(name):
                how = {"type": kind, "metavar": value}
            parser.add_argument(f"--{name}", default=SWITCHES.get(name), help=text, **how)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the words and check the result; every mistake becomes a UsageError."""
        if not args or args[0] not in self.names:  # help, or a variable names the subcommand
            self.config = parser.parse_args(args)
            return
        command, given = args[0], self.state.given
        own: Any = self._parser(command)
        import_short_names(option.text for option in given.options)
        check_variables(self.names, own.get_defaults().keys(branches=True))
        Parser.refusals.clear()
        try:
            self.config = parser.parse_args(args)
        except RefusalError as err:
            raise explain(err, given, command, own) from err
        config = self.config[command]
        if command != "fit" and not config.get("ckpt_path"):
            note("without ckpt_path the weights are those of a new model")
        check_numbers(config, given)
        check_tiles(command, config)
        if command == "predict":
            check_output(config)
        self.after_parsing(config.trainer)
        config.trainer.accelerator = meant(config.trainer.accelerator)
        path, trusted = in_own_home(config.get("ckpt_path")), config.get("weights_only") is False
        with as_usage_error(ValueError):
            stored = hyperparameters(Path(path), trusted=trusted) if path else {}
        check_model(config.model, stored, str(path))
        for key, part in (("model", stored), ("data", None), ("trainer.strategy", None)):
            for sentence in fill_in(config.get(key), given, key, part):
                note(sentence)
        check(config, given)

    def after_parsing(self, trainer: Any) -> None:
        """Change resolved options of the trainer, in place."""

    def _parse_ckpt_path(self) -> None:
        """Leave the checkpoint's hyperparameters alone, which `parse_arguments` has read."""

    def before_instantiate_classes(self) -> None:
        """Keep the error that a constructor raises, which the parser would replace."""
        command = self.config["subcommand"]
        build = builder(command, self.config[command], self.state.build)
        self.parser.add_instantiator(build, object)

    def after_instantiate_classes(self) -> None:
        """Let a refusal stop the processes that the trainer launches."""
        self.state.trainer = self.trainer
        self.state.ckpt_path = self.config[self.config["subcommand"]].ckpt_path
        fit_bar(self.trainer, self.config[self.config["subcommand"]].trainer.callbacks)
        if isinstance(self.trainer.strategy, HybridShardStrategy):
            options: dict[str, Any] = vars(self.config[self.config["subcommand"]].as_flat())
            self.trainer.strategy.config = {
                key: re.sub(" at 0x[0-9a-f]+", "", str(value))  # addresses of objects differ
                for key, value in options.items()
                if key != "config"
            }

    def _run_subcommand(self, subcommand: str) -> None:
        config = self.config[subcommand]
        if not config.tiles or subcommand != "predict":
            super()._run_subcommand(subcommand)
            return
        dims = strategy_options(config.trainer).get("shard_dims")
        where = {name: config[name] for name in ("tile_memory", "tile_budget")}
        what = self.trainer, self.model, self.datamodule, config.tiles, dims
        with predicting(*what, **where, gather=not config.output) as least:
            if least is not None:
                note(str(least))
            super()._run_subcommand(subcommand)

    def before_predict(self) -> None:
        """Let predictions go into a file, unless a callback of the configuration writes them."""
        output = self.config["predict"]["output"]
        callbacks = callbacks_of(self.trainer)
        if output or not any(isinstance(each, BasePredictionWriter) for each in callbacks):
            # the first one, so that a refusal comes before the first step has ended
            callbacks.insert(0, PredictionWriter(output))

    def before_fit(self) -> None:
        """Refuse before training what could only fail after it."""
        if self.config["fit"]["test_after_fit"] and not is_overridden("test_step", self.model):
            name = type(self.model).__name__
            raise UsageError(
                f"test_after_fit is true but {name} has no test_step; add one, or set it to false"
            )
        if self.config["fit"]["report"]:
            add_once(self.trainer, RunReport(self.text))
        if self.config["fit"]["profile"]:
            add_once(self.trainer, StepProfile())

    @property
    def text(self) -> str:
        """The options of the subcommand, as YAML."""
        command = str(self.config["subcommand"])
        return self._parser(command).dump(self.config[command], skip_none=False, format="yaml")

    @property
    def folder(self) -> str | None:
        """The folder into which this run writes."""
        return in_own_home(self.config["fit"]["trainer"]["default_root_dir"])

    def after_fit(self) -> None:
        """Test the final weights if `test_after_fit` asks for it; say where everything lies."""
        if self.config["fit"]["test_after_fit"]:
            self.trainer.test(self.model, datamodule=self.datamodule)
        # all ranks ask, since the folder of the logs is a collective
        lines = self.state.last_words(self.trainer)
        if self.trainer.is_global_zero:
            print("\n".join(lines), file=sys.stderr)


def run(
    args: Sequence[str],
    given: Given,
    make: Callable[[Sequence[str], RunState], ShardCLI] = ShardCLI,
) -> None:
    """Run a subcommand of Lightning.

    Args:
        args: The words of the command line.
        given: The options in these words, in files and in the environment.
        make: Makes the parser, which builds and runs the Trainer.
    """
    state = RunState(given)
    # lightning 2.6 and this file say skip_none, renamed to skip_unset in recent jsonargparse
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    leave_out_chatter(args[0] if args else "")
    try:
        make(args, state)
    except UsageError as err:
        exit_with(err)
    except Exception as wrapped:
        err = origin(wrapped, state.error)
        if shows_traceback() or (state.stepped and not of_the_disk(err)):
            raise err from err.__cause__
        if state.stepped and state.trainer is not None:
            words = words_of_a_failure(state.trainer, state.first_step is not None)
            err.add_note("\n".join(words))
        state.stop_children()
        named = given.mentioned(str(err)) if state.first_step is None else ()
        exit_with(err, named)
    except SystemExit:  # Lightning makes this of Ctrl-C
        if (trainer := state.trainer) and trainer.interrupted and is_first_rank():
            words = words_of_an_interrupt(trainer, state.first_step is not None)
            print("\n".join(words), file=sys.stderr)
        raise
