"""Starts the other processes of a script, with a Trainer or with a loop of Fabric."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from typing_extensions import override

from lightning_shard.lightning import FabricSubprocessLauncher, TrainerSubprocessLauncher
from lightning_shard.processes.cpu_settings import share_cores
from lightning_shard.processes.failures.orphans import begin_to_start
from lightning_shard.processes.script_processes import (
    flags_of_python,
    own_end,
    refuse_a_program_without_a_file,
    watch_others,
)


@own_end()
def _in_patience(launcher: Any, launch: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Start the other processes of a script, unless they run, and call a function in this one.

    Raises:
        RuntimeError: The script has no file that could be run again.
    """
    if launcher.cluster_environment.creates_processes_externally:  # or in an earlier stage
        return launch(function)
    refuse_a_program_without_a_file()
    begin_to_start()
    share_cores(launcher.num_processes)  # Lightning does so once the others have started

    starts = ExitStack()

    def begun() -> Any:
        starts.close()
        watched, launcher.procs = launcher.procs, [*launcher.procs]
        watched.clear()  # Lightning's own observer has nothing left to kill
        watch_others(launcher.procs)
        return function()

    with starts:
        starts.enter_context(flags_of_python())
        return launch(begun)


class FabricScriptLauncher(FabricSubprocessLauncher):
    """Starts the other processes of a script with a loop of Fabric."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the processes, and call the function in this one, too."""
        return _in_patience(self, super().launch, partial(function, *args, **kwargs))


class SubprocessScriptLauncher(TrainerSubprocessLauncher):
    """Starts the other processes of a script with a Trainer."""

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Start the processes, and call the function in this one, too."""
        return _in_patience(self, super().launch, partial(function, *args, **kwargs))
