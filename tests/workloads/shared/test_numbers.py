"""Numbers that have no meaning are refused as a module or data module is built."""

import pytest

from lightning_modules import (
    DarcyDataModule,
    MNISTDataModule,
    SummarizationDataModule,
    SyntheticImagesDataModule,
    TFNODarcy,
)


@pytest.mark.parametrize(
    ("made", "arguments", "sentence"),
    [
        (TFNODarcy, {"n_layers": 0}, "n_layers must be 1 or more; got 0"),
        (TFNODarcy, {"n_modes": (8, 0)}, r"n_modes must be 1 or more; got \(8, 0\)"),
        (DarcyDataModule, {"train_resolution": 2}, "train_resolution must be 3 or more; got 2"),
        (DarcyDataModule, {"num_test": [4, -1]}, r"num_test must be 1 or more; got \[4, -1\]"),
        (DarcyDataModule, {"test_resolutions": []}, r"at least one resolution; got \[\]"),
        (MNISTDataModule, {"batch_size": 0}, "batch_size must be 1 or more; got 0"),
        (SummarizationDataModule, {"num_val": 0}, "num_val must be 1 or more; got 0"),
        (SyntheticImagesDataModule, {"num_workers": -1}, "num_workers must be 0 or more; got -1"),
    ],
)
def test_refused_by_name(made, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(**arguments)
