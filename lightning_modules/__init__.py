"""Lightning modules and data modules that train unchanged under `lightning_shard`.

Each name is imported when it is first used, so that one workload does not need the packages of
another.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_modules.shared.optional import not_installed

if TYPE_CHECKING:
    from lightning_modules.aurora.data import AuroraDataModule as AuroraDataModule
    from lightning_modules.aurora.forecast_gallery import ForecastGallery as ForecastGallery
    from lightning_modules.aurora.model import AuroraForecast as AuroraForecast
    from lightning_modules.cnn.simple_cnn import SimpleCNN as SimpleCNN
    from lightning_modules.cnn.simple_cnn import SimpleCNNModule as SimpleCNNModule
    from lightning_modules.cnn.simple_cnn import (
        SyntheticImagesDataModule as SyntheticImagesDataModule,
    )
    from lightning_modules.darcy.data import DarcyDataModule as DarcyDataModule
    from lightning_modules.darcy.error_plots import ErrorPlots as ErrorPlots
    from lightning_modules.darcy.gallery import PredictionGallery as PredictionGallery
    from lightning_modules.darcy.tfno import TFNODarcy as TFNODarcy
    from lightning_modules.mnist.data import MNISTDataModule as MNISTDataModule
    from lightning_modules.mnist.mistakes import Mistakes as Mistakes
    from lightning_modules.mnist.model import MNISTModule as MNISTModule
    from lightning_modules.mnist.model import MNISTNet as MNISTNet
    from lightning_modules.segmentation.data import SegmentationDataModule as SegmentationDataModule
    from lightning_modules.segmentation.gallery import SegmentationGallery as SegmentationGallery
    from lightning_modules.segmentation.model import VolumeSegmentation as VolumeSegmentation
    from lightning_modules.shared.save_weights import SaveWeights as SaveWeights
    from lightning_modules.shared.series import SeriesDataModule as SeriesDataModule
    from lightning_modules.t5.corpus import Corpus as Corpus
    from lightning_modules.t5.data import SummarizationDataModule as SummarizationDataModule
    from lightning_modules.t5.dated_checkpoint import DatedCheckpoint as DatedCheckpoint
    from lightning_modules.t5.docstrings import Docstrings as Docstrings
    from lightning_modules.t5.model import T5Summarizer as T5Summarizer
    from lightning_modules.t5.relative_adamw import RelativeAdamW as RelativeAdamW
    from lightning_modules.t5.relative_adamw import WarmupLinear as WarmupLinear
    from lightning_modules.t5.summary_table import SummaryTable as SummaryTable
    from lightning_modules.t5.wikihow import WikiHow as WikiHow

_MODULES = {
    "AuroraDataModule": "aurora.data",
    "AuroraForecast": "aurora.model",
    "ForecastGallery": "aurora.forecast_gallery",
    "SimpleCNN": "cnn.simple_cnn",
    "SimpleCNNModule": "cnn.simple_cnn",
    "SyntheticImagesDataModule": "cnn.simple_cnn",
    "DarcyDataModule": "darcy.data",
    "ErrorPlots": "darcy.error_plots",
    "PredictionGallery": "darcy.gallery",
    "TFNODarcy": "darcy.tfno",
    "MNISTDataModule": "mnist.data",
    "Mistakes": "mnist.mistakes",
    "MNISTModule": "mnist.model",
    "MNISTNet": "mnist.model",
    "SegmentationDataModule": "segmentation.data",
    "SegmentationGallery": "segmentation.gallery",
    "VolumeSegmentation": "segmentation.model",
    "SaveWeights": "shared.save_weights",
    "SeriesDataModule": "shared.series",
    "Corpus": "t5.corpus",
    "SummarizationDataModule": "t5.data",
    "DatedCheckpoint": "t5.dated_checkpoint",
    "Docstrings": "t5.docstrings",
    "T5Summarizer": "t5.model",
    "RelativeAdamW": "t5.relative_adamw",
    "WarmupLinear": "t5.relative_adamw",
    "SummaryTable": "t5.summary_table",
    "WikiHow": "t5.wikihow",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as err:
        raise not_installed(err, f"{__name__}.{name}") from err
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
