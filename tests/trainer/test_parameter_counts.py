"""The summary of a model with complex weights is that of plain Lightning."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary

from tests.training import loader, make, trainer


class Counted(ModelSummary):
    """What is printed, kept."""

    def summarize(self, summary_data, total_parameters, trainable_parameters, *_, **__):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.counts = total_parameters, trainable_parameters, dict(summary_data)["Params"]


@pytest.mark.quick_rows("dense_fno")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", ["dense_fno", "tfno"])
def test_complex_weights_are_counted_once(name):
    module, summary = make(name, torch.float32), Counted()
    total = sum(p.numel() for p in module.parameters())
    assert any(p.is_complex() for p in module.parameters())
    runner = trainer((2,), callbacks=[summary], max_steps=1, strategy={"sharding": "full"})
    for _ in range(2):  # the second fit finds the first one's wrapper
        runner.fit(module, loader(name, torch.float32, 2, 4))
        if torch.distributed.get_rank() == 0:
            assert summary.counts[:2] == (total, total)
    stored = sum(p.numel() for p in module.parameters())
    assert stored > total  # pairs, for whoever asks afterwards
