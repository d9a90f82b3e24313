"""Lightning modules and data modules that train unchanged under `lightning_shard`."""

from lightning_modules.corpus import Corpus as Corpus
from lightning_modules.darcy_data import DarcyDataModule as DarcyDataModule
from lightning_modules.docstrings import Docstrings as Docstrings
from lightning_modules.epoch_report import EpochReport as EpochReport
from lightning_modules.error_plots import ErrorPlots as ErrorPlots
from lightning_modules.fields import FieldDataset as FieldDataset
from lightning_modules.gallery import PredictionGallery as PredictionGallery
from lightning_modules.mistakes import Mistakes as Mistakes
from lightning_modules.mnist import MNISTModule as MNISTModule
from lightning_modules.mnist import MNISTNet as MNISTNet
from lightning_modules.mnist_data import MNISTDataModule as MNISTDataModule
from lightning_modules.relative_adamw import RelativeAdamW as RelativeAdamW
from lightning_modules.relative_adamw import WarmupLinear as WarmupLinear
from lightning_modules.simple_cnn import SimpleCNN as SimpleCNN
from lightning_modules.simple_cnn import SimpleCNNModule as SimpleCNNModule
from lightning_modules.simple_cnn import SyntheticImagesDataModule as SyntheticImagesDataModule
from lightning_modules.summarization_data import (
    SummarizationDataModule as SummarizationDataModule,
)
from lightning_modules.summary_table import SummaryTable as SummaryTable
from lightning_modules.t5 import T5Summarizer as T5Summarizer
from lightning_modules.tfno_darcy import TFNODarcy as TFNODarcy
from lightning_modules.wikihow import WikiHow as WikiHow
