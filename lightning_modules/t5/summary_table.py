"""Tables of generated summaries: a Callback for modules whose evaluation steps return them."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

COLUMNS = ["source", "reference", "generated"]


class SummaryTable(Callback):
    """Save some texts with their reference and their generated summaries after each epoch.

    Tables go to `summaries/` in the trainer's log directory: `epoch_0004.csv` and so on while
    fitting, `test.csv` after a test. Loggers that take tables or texts get them too. The batch must
    be a dict with lists `source` and `summary`, and `validation_step` must return a dict with a
    list `generated` for the first batch. With several processes the texts are those of the first.

    Args:
        num_rows: Texts per table.
    """

    def __init__(self, num_rows: int = 20) -> None:
        self.num_rows = num_rows
        self._folder = Path()
        self._rows: list[list[str]] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # on every rank: log_dir is broadcast from rank 0
        self._folder = Path(trainer.log_dir or trainer.default_root_dir) / "summaries"

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the texts of the first batch."""
        if batch_idx or dataloader_idx:
            return
        if not isinstance(outputs, Mapping) or "generated" not in outputs:
            keys: list[str] = sorted(outputs) if isinstance(outputs, Mapping) else []
            got = keys if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ValueError(
                "SummaryTable needs evaluation steps that return a dict with `generated` for the "
                f"first batch; got {got}. Return it (T5Summarizer: num_generated_batches of 1 or "
                "more), or remove the callback."
            )
        generated: list[str] = outputs["generated"]
        columns: tuple[list[str], ...] = (batch["source"], batch["summary"], generated)
        self._rows = [list(row) for row in zip(*columns, strict=True)][: self.num_rows]

    on_test_batch_end = on_validation_batch_end

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, f"epoch_{trainer.current_epoch:04d}")

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = self._save(trainer, "test")
        rank_zero_info(f"Generated summaries: {path}")

    def _save(self, trainer: Trainer, name: str) -> Path:
        path = self._folder / f"{name}.csv"
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([COLUMNS, *self._rows])
            for logger in trainer.loggers:
                _log_table(logger, self._rows, step=trainer.global_step)
        return path


def _log_table(logger: Any, rows: list[list[str]], *, step: int) -> None:
    """Hand the table to a logger that has a way to take it; loggers share no interface for it."""
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_text"):  # TensorBoard, which renders Markdown
        lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
        experiment.add_text("summaries", "\n".join(f"| {' | '.join(c)} |" for c in cells), step)
    elif hasattr(logger, "log_table"):  # Weights & Biases
        logger.log_table("summaries", columns=COLUMNS, data=rows, step=step)
