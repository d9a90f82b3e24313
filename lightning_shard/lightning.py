"""Gives the names of Lightning that this package uses, from the package that the program uses.

`lightning` and `pytorch_lightning` are the same code under two names, and a Trainer of one takes
nothing of the other. Which of them it is, is asked once: when the first name is used.
"""

import functools
import importlib
import sys
from typing import Any

LIGHTNING, OLDER = "lightning", "pytorch_lightning"
_ROOTS = {LIGHTNING: LIGHTNING, "lightning_fabric": OLDER, OLDER: OLDER}

# public names, by the module that has them; some have another name there
_NAMES = {
    "fabric.accelerators.accelerator": "FabricAccelerator=Accelerator",
    "fabric.plugins": "CheckpointIO ClusterEnvironment FabricPrecision=Precision",
    "fabric.plugins.environments.lightning": "LightningEnvironment",
    "fabric.plugins.environments.lsf": "LSFEnvironment",
    "fabric.plugins.environments.mpi": "MPIEnvironment",
    "fabric.plugins.environments.slurm": "SLURMEnvironment",
    "fabric.plugins.environments.torchelastic": "TorchElasticEnvironment",
    "fabric.plugins.precision":
        "FabricHalfPrecision=HalfPrecision FabricMixedPrecision=MixedPrecision",
    "fabric.strategies": "STRATEGY_REGISTRY",
    "fabric.strategies.parallel": "FabricParallelStrategy=ParallelStrategy",
    "fabric.strategies.strategy": "FabricBaseStrategy=Strategy",
    "fabric.utilities": "fabric_rank_zero=rank_zero move_data_to_device",
    "fabric.utilities.cloud_io": "get_filesystem",
    "fabric.utilities.exceptions": "MisconfigurationException",
    "fabric.utilities.seed": "pl_worker_init_function",
    "fabric.utilities.warnings": "PossibleUserWarning",
    "pytorch":
        "Callback LightningDataModule LightningModule Trainer VERSION=__version__ "
        "seed_everything",
    "pytorch.accelerators": "Accelerator AcceleratorRegistry",
    "pytorch.callbacks":
        "BaseFinetuning BasePredictionWriter Checkpoint EarlyStopping "
        "GradientAccumulationScheduler LearningRateFinder ModelCheckpoint ModelSummary "
        "RichProgressBar StochasticWeightAveraging TQDMProgressBar WeightAveraging",
    "pytorch.cli": "LightningArgumentParser LightningCLI SaveConfigCallback",
    "pytorch.core.optimizer": "LightningOptimizer",
    "pytorch.loggers.logger": "DummyLogger",
    "pytorch.overrides.distributed":
        "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper",
    "pytorch.plugins": "HalfPrecision MixedPrecision Precision",
    "pytorch.plugins.io": "TorchCheckpointIO",
    "pytorch.profilers": "PyTorchProfiler",
    "pytorch.strategies":
        "DDPStrategy ParallelStrategy Strategy StrategyRegistry",
    "pytorch.trainer.states": "TrainerFn TrainerStatus",
    "pytorch.utilities": "rank_zero_info rank_zero_warn",
    "pytorch.utilities.data": "extract_batch_size",
    "pytorch.utilities.exceptions": "SIGTERMException",
    "pytorch.utilities.model_helpers": "is_overridden",
    "pytorch.utilities.signature_utils": "is_param_in_hook_signature",
}  # fmt: skip
# private names, each with its place and with what works by it
PRIVATE = {
    "BackwardSyncControl":
        ("fabric.strategies.strategy", "_BackwardSyncControl",
         "Fabric leaves gradients unsynchronized while it accumulates them"),
    "FabricSubprocessLauncher":
        ("fabric.strategies.launchers.subprocess_script", "_SubprocessScriptLauncher",
         "Fabric starts the processes of a script by itself"),
    "LRCallback":
        ("pytorch.tuner.lr_finder", "_LRCallback",
         "the search of a learning rate sees the mean loss of replicas"),
    "Launcher": ("pytorch.strategies.launchers.launcher", "_Launcher", "the same"),
    "Metadata":
        ("pytorch.trainer.connectors.logger_connector.result", "_Metadata",
         "a rank without samples of an evaluation has metrics of it"),
    "MultiProcessingLauncher":
        ("pytorch.strategies.launchers.multiprocessing", "_MultiProcessingLauncher",
         "a Trainer starts the processes of a notebook"),
    "ResultMetric":
        ("pytorch.trainer.connectors.logger_connector.result", "_ResultMetric",
         "the same"),
    "Sync": ("pytorch.trainer.connectors.logger_connector.result", "_Sync", "the same"),
    "TrainerSubprocessLauncher":
        ("pytorch.strategies.launchers.subprocess_script", "_SubprocessScriptLauncher",
         "a Trainer starts the processes of a script by itself"),
    "WorkerOutput": ("pytorch.strategies.launchers.multiprocessing", "_WorkerOutput", "the same"),
    "WrappingCheckpointIO":
        ("pytorch.plugins.io.wrapper", "_WrappingCheckpointIO",
         "a plug-in around a CheckpointIO, such as AsyncCheckpointIO, writes our files"),
    "destroy_process_group":
        ("fabric.utilities.distributed", "_destroy_dist_connection",
         "torch does not warn at the exit on NVIDIA GPUs; Ctrl-C is ignored meanwhile"),
    "optimizers_to_device":
        ("fabric.utilities.optimizer", "_optimizers_to_device",
         "states that a user gave to an optimizer leave the CPU"),
    "update_dataloader":
        ("pytorch.utilities.data", "_update_dataloader",
         "a loader is given the samples of one replica"),
}  # fmt: skip


@functools.cache
def package() -> str:
    """Return the package of this program: the one that was imported first, else `lightning`."""
    return next((_ROOTS[name] for name in [*sys.modules] if name in _ROOTS), LIGHTNING)


def is_imported() -> bool:
    """Return whether the program has imported Lightning, under either name."""
    return not _ROOTS.keys().isdisjoint(sys.modules)


def refuse_mixture(thing: Any) -> None:
    """Refuse an object of the other package.

    Raises:
        TypeError: The class of the object extends one of the other package.
    """
    roots = {base.__module__.partition(".")[0] for base in type(thing).__mro__}
    other = OLDER if package() == LIGHTNING else LIGHTNING
    if other in roots and package() not in roots:
        raise TypeError(f"{type(thing).__name__} is of the package {other}; {mixture()}")


def mixture() -> str:
    """Word which package this one has taken, and how a program chooses it."""
    return (
        f"lightning_shard has taken {package()}, the same code under another name, which was "
        "imported first. Import all from one of them, and it before lightning_shard"
    )


def __getattr__(name: str) -> Any:
    """Find a name in the package of this program."""
    module, there = places().get(name, ("", ""))
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = f"lightning.{module}"
    if package() == OLDER:
        path = path.replace("lightning.pytorch", OLDER)
        path = path.replace("lightning.fabric", "lightning_fabric")
    found = getattr(importlib.import_module(path), there, None)
    globals()[name] = importlib.import_module(f"{path}.{there}") if found is None else found
    return globals()[name]


@functools.cache
def places() -> dict[str, tuple[str, str]]:
    """Return for each name the module that has it, without its package, and its name there."""
    public = {
        name.partition("=")[0]: (module, name.rpartition("=")[2])
        for module, names in _NAMES.items()
        for name in names.split()
    }
    return public | {name: (module, there) for name, (module, there, _) in PRIVATE.items()}
