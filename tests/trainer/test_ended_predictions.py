"""A prediction that SIGTERM ends says what is left of it, in tiles as on ranks."""

import os
import signal

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, PredictionWriter, TiledStrategy
from lightning_shard.lightning import SIGTERMException


class IsEnded(LightningModule):
    """The launcher ends its process in the second batch."""

    def predict_step(self, batch, batch_idx):
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch + 1


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.parametrize("strategy", [HybridShardStrategy, lambda: TiledStrategy(2)])
def test_sigterm_says_that_a_prediction_begins_anew(strategy, tmp_path, capfd, caplog):
    caplog.set_level("INFO")
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "predicted.zarr"
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy(),
        callbacks=[PredictionWriter(path)], **options,
    )  # fmt: skip
    fields = DataLoader(torch.randn(3, 1, 6, 5), 1)
    try:
        with pytest.raises(SIGTERMException):
            trainer.predict(IsEnded(), fields, return_predictions=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "SIGTERM: predict ends at once, and begins anew when it is run again" in (
        capfd.readouterr().err
    )
    assert f"No predictions are kept in {path}, since not all were made: run again." in caplog.text
    assert not any(tmp_path.iterdir())
