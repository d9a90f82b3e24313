"""Lightning modules and data modules that train unchanged under `lightning_shard`."""

from lightning_modules.darcy_data import DarcyDataModule as DarcyDataModule
from lightning_modules.gallery import PredictionGallery as PredictionGallery
from lightning_modules.tfno_darcy import TFNODarcy as TFNODarcy
