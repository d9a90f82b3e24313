"""Forks an interactive session into the Trainer's processes, as Lightning's `ddp_notebook` does."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_shard.checkpoint.state import full
from lightning_shard.fsdp.materialize import is_deferred
from lightning_shard.lightning import (
    LightningEnvironment,
    MultiProcessingLauncher,
    ParallelStrategy,
    Trainer,
    TrainerFn,
    WorkerOutput,
)
from lightning_shard.processes.forking import (
    become_rank,
    begin_forked_rank,
    forking,
    store_of_ranks,
    what_no_fork_has,
)


class NotebookLauncher(MultiProcessingLauncher):
    """Forks the session, and brings weights and metrics back to its module and Trainer."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        """Fork this session for each process of `strategy`."""
        super().__init__(strategy, start_method="fork")

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **named: Any
    ) -> Any:
        """Run `function` on all ranks; return what it returns on rank 0.

        Raises:
            RuntimeError: The session cannot be forked.
        """
        if begun := what_no_fork_has():
            raise RuntimeError(
                f"the Trainer forks this session into {self._strategy.num_processes} processes, "
                f"which is impossible because {begun} in it; restart the kernel and call the "
                "Trainer before anything uses a device or compiles, or run a script."
            )
        outside = os.environ.get("MASTER_PORT")
        try:
            ranks = self._strategy.num_processes
            with forking(ranks) as self._forks, store_of_ranks() as port:
                os.environ["MASTER_PORT"] = str(port)
                self._strategy.cluster_environment = LightningEnvironment()  # it asks once for it
                return super().launch(function, *args, trainer=trainer, **named)
        finally:
            os.environ.pop("MASTER_PORT", None)  # Lightning has set it
            if outside is not None:
                os.environ["MASTER_PORT"] = outside

    @override
    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        begin_forked_rank(self._forks)
        become_rank(process_idx, self._strategy.num_processes, int(os.environ["MASTER_PORT"]))
        super()._wrapping_function(process_idx, *args, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> WorkerOutput | None:
        """Return what Lightning returns, with whole weights in place of shards."""
        module, first = trainer.lightning_module, self._strategy.local_rank == 0
        fitted = trainer.state.fn == TrainerFn.FITTING
        state = full(module.state_dict(), keep=first) if fitted else None
        if not first:
            return None
        file = None
        if state is not None:
            file = Path(tempfile.mkdtemp()) / "weights"
            torch.save(state, file)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return WorkerOutput(best, file, trainer.state, results, self.get_extra_results(trainer))

    @override
    def _recover_results_in_main_process(
        self, worker_output: WorkerOutput, trainer: Trainer
    ) -> None:
        if worker_output.weights_path is not None:
            file, module = Path(worker_output.weights_path), trainer.lightning_module
            with trainer.precision_plugin.module_init_context():
                module.configure_model()  # layers that only the ranks have yet
            state = torch.load(file, map_location="cpu", weights_only=False)
            module.load_state_dict(state, strict=False, assign=is_deferred(module))
            file.unlink()
            file.parent.rmdir()
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)
