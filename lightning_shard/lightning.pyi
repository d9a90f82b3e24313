# Types for lightning.py, by which checkers read the names of Lightning.

from typing import Any

from lightning.fabric.accelerators.accelerator import Accelerator as FabricAccelerator
from lightning.fabric.plugins import CheckpointIO as CheckpointIO
from lightning.fabric.plugins import ClusterEnvironment as ClusterEnvironment
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.plugins.environments.lightning import (
    LightningEnvironment as LightningEnvironment,
)
from lightning.fabric.plugins.environments.lsf import LSFEnvironment as LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment as MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment as SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import (
    TorchElasticEnvironment as TorchElasticEnvironment,
)
from lightning.fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY as STRATEGY_REGISTRY
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as FabricSubprocessLauncher,
)
from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricBaseStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.fabric.utilities import move_data_to_device as move_data_to_device
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.fabric.utilities.cloud_io import get_filesystem as get_filesystem
from lightning.fabric.utilities.distributed import _destroy_dist_connection as destroy_process_group
from lightning.fabric.utilities.exceptions import (
    MisconfigurationException as MisconfigurationException,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function as pl_worker_init_function
from lightning.fabric.utilities.warnings import PossibleUserWarning as PossibleUserWarning
from lightning.pytorch import Callback as Callback
from lightning.pytorch import LightningDataModule as LightningDataModule
from lightning.pytorch import LightningModule as LightningModule
from lightning.pytorch import Trainer as Trainer
from lightning.pytorch import seed_everything as seed_everything
from lightning.pytorch.accelerators import Accelerator as Accelerator
from lightning.pytorch.accelerators import AcceleratorRegistry as AcceleratorRegistry
from lightning.pytorch.callbacks import BaseFinetuning as BaseFinetuning
from lightning.pytorch.callbacks import BasePredictionWriter as BasePredictionWriter
from lightning.pytorch.callbacks import Checkpoint as Checkpoint
from lightning.pytorch.callbacks import EarlyStopping as EarlyStopping
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler as GradientAccumulationScheduler,
)
from lightning.pytorch.callbacks import LearningRateFinder as LearningRateFinder
from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
from lightning.pytorch.callbacks import ModelSummary as ModelSummary
from lightning.pytorch.callbacks import RichProgressBar as RichProgressBar
from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
from lightning.pytorch.callbacks import TQDMProgressBar as TQDMProgressBar
from lightning.pytorch.callbacks import WeightAveraging as WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser as LightningArgumentParser
from lightning.pytorch.cli import LightningCLI as LightningCLI
from lightning.pytorch.cli import SaveConfigCallback as SaveConfigCallback
from lightning.pytorch.core.optimizer import LightningOptimizer as LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger as DummyLogger
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler as UnrepeatedDistributedSampler,
)
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSamplerWrapper as UnrepeatedDistributedSamplerWrapper,
)
from lightning.pytorch.plugins import HalfPrecision as HalfPrecision
from lightning.pytorch.plugins import MixedPrecision as MixedPrecision
from lightning.pytorch.plugins import Precision as Precision
from lightning.pytorch.plugins.io import TorchCheckpointIO as TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.profilers import PyTorchProfiler as PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
from lightning.pytorch.strategies import ParallelStrategy as ParallelStrategy
from lightning.pytorch.strategies import Strategy as Strategy
from lightning.pytorch.strategies import StrategyRegistry as StrategyRegistry
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput as WorkerOutput
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as TrainerSubprocessLauncher,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultMetric as ResultMetric,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync
from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
from lightning.pytorch.trainer.states import TrainerStatus as TrainerStatus
from lightning.pytorch.tuner.lr_finder import _LRCallback as LRCallback
from lightning.pytorch.utilities import rank_zero_info as rank_zero_info
from lightning.pytorch.utilities import rank_zero_warn as rank_zero_warn
from lightning.pytorch.utilities.data import _update_dataloader as update_dataloader
from lightning.pytorch.utilities.data import extract_batch_size as extract_batch_size
from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
from lightning.pytorch.utilities.signature_utils import (
    is_param_in_hook_signature as is_param_in_hook_signature,
)

__all__ = [
    "LIGHTNING",
    "OLDER",
    "PRIVATE",
    "STRATEGY_REGISTRY",
    "VERSION",
    "Accelerator",
    "AcceleratorRegistry",
    "BackwardSyncControl",
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "Checkpoint",
    "CheckpointIO",
    "ClusterEnvironment",
    "DDPStrategy",
    "DummyLogger",
    "EarlyStopping",
    "FabricAccelerator",
    "FabricBaseStrategy",
    "FabricHalfPrecision",
    "FabricMixedPrecision",
    "FabricParallelStrategy",
    "FabricPrecision",
    "FabricSubprocessLauncher",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "LRCallback",
    "LSFEnvironment",
    "Launcher",
    "LearningRateFinder",
    "LightningArgumentParser",
    "LightningCLI",
    "LightningDataModule",
    "LightningEnvironment",
    "LightningModule",
    "LightningOptimizer",
    "MPIEnvironment",
    "Metadata",
    "MisconfigurationException",
    "MixedPrecision",
    "ModelCheckpoint",
    "ModelSummary",
    "MultiProcessingLauncher",
    "ParallelStrategy",
    "PossibleUserWarning",
    "Precision",
    "PyTorchProfiler",
    "ResultMetric",
    "RichProgressBar",
    "SIGTERMException",
    "SLURMEnvironment",
    "SaveConfigCallback",
    "StochasticWeightAveraging",
    "Strategy",
    "StrategyRegistry",
    "Sync",
    "TQDMProgressBar",
    "TorchCheckpointIO",
    "TorchElasticEnvironment",
    "Trainer",
    "TrainerFn",
    "TrainerStatus",
    "TrainerSubprocessLauncher",
    "UnrepeatedDistributedSampler",
    "UnrepeatedDistributedSamplerWrapper",
    "WeightAveraging",
    "WorkerOutput",
    "WrappingCheckpointIO",
    "destroy_process_group",
    "extract_batch_size",
    "fabric_rank_zero",
    "get_filesystem",
    "is_imported",
    "is_overridden",
    "is_param_in_hook_signature",
    "mixture",
    "move_data_to_device",
    "optimizers_to_device",
    "package",
    "pl_worker_init_function",
    "places",
    "rank_zero_info",
    "rank_zero_warn",
    "refuse_mixture",
    "seed_everything",
    "update_dataloader",
]  # fmt: skip

LIGHTNING: str
OLDER: str
VERSION: str
PRIVATE: dict[str, tuple[str, str, str]]

def package() -> str: ...
def is_imported() -> bool: ...
def places() -> dict[str, tuple[str, str]]: ...
def refuse_mixture(thing: Any) -> None: ...
def mixture() -> str: ...
