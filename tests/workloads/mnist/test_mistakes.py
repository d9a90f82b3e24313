from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from matplotlib.image import imread
from torch.utils.data import DataLoader

from lightning_modules import Mistakes, MNISTModule
from lightning_modules.mnist import mistakes
from tests import training

SAMPLES = [(torch.rand(1, 28, 28, generator=training.generator(i)), i % 10) for i in range(13)]


class Odd(MNISTModule):
    """Wrong on the even classes, which it takes for the next one."""

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        return batch[1] + (batch[1] % 2 == 0)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(1,), (2,), (2, 2)], ids=str)
def test_every_sample_counts_once(domain):
    """Thirteen samples, so that samplers repeat some."""
    folder = training.shared_path("run")
    drawn = []
    draw = mistakes.draw_mistakes

    def keep(wrong, *args):
        drawn.extend(wrong)
        return draw(wrong, *args)

    confusions = mock.patch.object(mistakes, "draw_confusion", wraps=mistakes.draw_confusion)
    with mock.patch.object(mistakes, "draw_mistakes", keep), confusions as drawn_confusion:
        runner = training.trainer(domain, callbacks=[Mistakes()], default_root_dir=folder)
        runner.test(Odd(), DataLoader(SAMPLES, 2), verbose=False)
    if not runner.is_global_zero:
        assert not drawn
        return
    wanted = np.zeros((10, 10), int)
    for _, label in SAMPLES:
        wanted[label, label + (label % 2 == 0)] += 1
    np.testing.assert_array_equal(drawn_confusion.call_args.args[0], wanted)
    even = [(image, label) for image, label in SAMPLES if label % 2 == 0]
    assert [(m.label, m.predicted) for m in drawn] == [(n, n + 1) for _, n in even]
    for mistake, (image, _) in zip(drawn, even, strict=True):
        np.testing.assert_array_equal(mistake.image, image.numpy())
    pictures = sorted(path.name for path in (folder / "gallery").iterdir())
    assert pictures == ["confusion.png", "mistakes.png"]


def trainer(tmp_path):
    return Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[Mistakes(num_images=3)],
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )


# two loader processes would take longer to start than these tests
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:Your `test_dataloader`'s sampler has shuffling enabled")
def test_pictures_of_lightnings_own_strategy(tmp_path, capsys):
    runner = trainer(tmp_path)
    for shuffled in (False, True):
        runner.test(Odd(), DataLoader(SAMPLES, 4, shuffle=shuffled), verbose=False)
        assert imread(tmp_path / "gallery" / "mistakes.png").std() > 0
        assert capsys.readouterr().out.count(str(tmp_path / "gallery")) == 1


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_says_what_a_step_must_return(tmp_path):
    class Silent(MNISTModule):
        def test_step(self, batch, batch_idx):
            pass

    with pytest.raises(ValueError, match="test_step that returns the predicted classes; got None"):
        trainer(tmp_path).test(Silent(), DataLoader(SAMPLES, 4), verbose=False)


def test_no_mistakes_and_colours(tmp_path):
    mistakes.draw_mistakes([], 0, 10).savefig(tmp_path / "none.png")
    wrong = [mistakes.Mistake(np.zeros((3, 4, 4)), 1, 2)]
    figure = mistakes.draw_mistakes(wrong, 5, 10)
    figure.savefig(tmp_path / "one.png")
    title = figure.get_suptitle()
    assert title == "5 of 10 misclassified, the first 1: true class → prediction"
    mistakes.draw_confusion(np.zeros((3, 3), int)).savefig(tmp_path / "empty.png")
