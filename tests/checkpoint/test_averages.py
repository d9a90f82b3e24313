"""Averages of weights in checkpoints: plain names and shapes, with which a resumed run goes on."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from lightning_shard.checkpoint.state import full_module_state
from tests.checkpoint.test_resume_inside_epoch import SaveOnce, shared_path
from tests.pairs import choose
from tests.training import loader, make, trainer

AVERAGES = {
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "swa": lambda: StochasticWeightAveraging(1e-3, 1),
}


def run(name, callbacks, path=None):
    module = make(name, torch.float32)
    runner = trainer((2,), callbacks=callbacks, max_epochs=3)
    runner.fit(module, loader(name, torch.float32, 4, 12), ckpt_path=path)
    return full_module_state(module)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(("name", "average"), choose(["tfno", "dense_fno"], AVERAGES))
def test_file_and_resume(name, average):
    path = shared_path("averaged.ckpt")
    whole = run(name, [AVERAGES[average](), SaveOnce(path)])
    saved = torch.load(path, weights_only=True)
    plain = {k: (v.shape, v.dtype) for k, v in make(name, torch.float32).state_dict().items()}
    averages = [saved["state_dict"]]
    if average == "ema":
        averages.append(saved["current_model_state"])
    else:
        averages += [v["average_model_state"] for v in saved["callbacks"].values() if v]
    for state in averages:
        assert {k: (v.shape, v.dtype) for k, v in state.items()} == plain
    resumed = run(name, [AVERAGES[average]()], path)
    for key, value in whole.items():
        assert torch.equal(resumed[key], value), key
