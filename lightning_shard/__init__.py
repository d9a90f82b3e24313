"""FSDP2 and spatial domain decomposition for PyTorch Lightning, by changing one argument.

These are the public names. Each is imported when it is first used, so that a script which only
splits a tensor loads neither Lightning nor zarr.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lightning_shard.lightning import is_imported

if TYPE_CHECKING:
    from lightning_shard.checkpoint.errors import UnsafeFileError as UnsafeFileError
    from lightning_shard.checkpoint.weights import load_weights as load_weights
    from lightning_shard.checkpoint.weights import save_weights as save_weights
    from lightning_shard.data.field_sink import FieldSink as FieldSink
    from lightning_shard.data.readers.field_dataset import FieldDataset as FieldDataset
    from lightning_shard.data.readers.field_file import FieldFile as FieldFile
    from lightning_shard.data.readers.field_file import write_fields as write_fields
    from lightning_shard.data.readers.pictures import ImageFile as ImageFile
    from lightning_shard.data.readers.series_dataset import SeriesDataset as SeriesDataset
    from lightning_shard.data.readers.series_file import SeriesFile as SeriesFile
    from lightning_shard.data.readers.series_file import open_series as open_series
    from lightning_shard.data.readers.volumes import VolumeDataset as VolumeDataset
    from lightning_shard.data.readers.volumes import VolumeFile as VolumeFile
    from lightning_shard.data.slab import Slab as Slab
    from lightning_shard.data.slab import slab_of as slab_of
    from lightning_shard.domain.errors import UnsupportedOperationError as UnsupportedOperationError
    from lightning_shard.domain.layout import Layout as Layout
    from lightning_shard.domain.subdomain import Subdomain as Subdomain
    from lightning_shard.fsdp.clip import clip_grad_norm_ as clip_grad_norm_
    from lightning_shard.fsdp.clip import clip_grad_value_ as clip_grad_value_
    from lightning_shard.fsdp.materialize import deferred_parameters as deferred_parameters
    from lightning_shard.fsdp.no_sync import no_sync as no_sync
    from lightning_shard.fsdp.options import ShardingOptions as ShardingOptions
    from lightning_shard.fsdp.parallelize import parallelize as parallelize
    from lightning_shard.fsdp.whole_parameters import whole_parameters as whole_parameters
    from lightning_shard.lab.calibrate import calibrate as calibrate
    from lightning_shard.lab.clusters import read_cluster as read_cluster
    from lightning_shard.lab.compare import certify as certify
    from lightning_shard.lab.compare import check as check
    from lightning_shard.lab.machine import Cluster as Cluster
    from lightning_shard.lab.predict import plan as plan
    from lightning_shard.lab.predict import predict as predict
    from lightning_shard.lab.prediction import Prediction as Prediction
    from lightning_shard.lab.ranking import Candidate as Candidate
    from lightning_shard.lab.ranking import Ranking as Ranking
    from lightning_shard.lab.ranking import Setting as Setting
    from lightning_shard.lab.result import Certificate as Certificate
    from lightning_shard.lab.result import Check as Check
    from lightning_shard.lab.search import best as best
    from lightning_shard.lab.simulate import simulate as simulate
    from lightning_shard.lab.tiled_strategy import TiledStrategy as TiledStrategy
    from lightning_shard.memory.in_tiles import in_tiles as in_tiles
    from lightning_shard.memory.split_inputs import split_inputs as split_inputs
    from lightning_shard.ops.elementwise.random import use_exact_random as use_exact_random
    from lightning_shard.ops.registry import register_rule as register_rule
    from lightning_shard.ops.spectral.cost import spectral_method as spectral_method
    from lightning_shard.points.curve import crossing_edges as crossing_edges
    from lightning_shard.points.curve import curve_order as curve_order
    from lightning_shard.points.curve import ordered_graph as ordered_graph
    from lightning_shard.points.neighbours import knn as knn
    from lightning_shard.points.neighbours import radius as radius
    from lightning_shard.processes.agreement import DisagreementError as DisagreementError
    from lightning_shard.processes.errors import LightningShardError as LightningShardError
    from lightning_shard.processes.errors import StuckError as StuckError
    from lightning_shard.processes.launch import launch as launch
    from lightning_shard.processes.mesh import find_mesh as find_mesh
    from lightning_shard.processes.mesh import init_mesh as init_mesh
    from lightning_shard.processes.process_info import process_info as process_info
    from lightning_shard.processes.start import start_process_group as start_process_group
    from lightning_shard.processes.variables import ProcessInfo as ProcessInfo
    from lightning_shard.tensor import functional as functional
    from lightning_shard.tensor.autograd_function import allow_function as allow_function
    from lightning_shard.tensor.escape import allow_gather as allow_gather
    from lightning_shard.tensor.escape import local_map as local_map
    from lightning_shard.tensor.placement import from_local as from_local
    from lightning_shard.tensor.placement import gather as gather
    from lightning_shard.tensor.placement import shard as shard
    from lightning_shard.tensor.tensor import DomainTensor as DomainTensor
    from lightning_shard.tiles.tile_tensor import Tiles as Tiles
    from lightning_shard.trainer.callbacks.device_timer import DeviceTimer as DeviceTimer
    from lightning_shard.trainer.callbacks.epoch_report import EpochReport as EpochReport
    from lightning_shard.trainer.callbacks.predictions import PredictionWriter as PredictionWriter
    from lightning_shard.trainer.callbacks.predictions import (
        predictions_in_order as predictions_in_order,
    )
    from lightning_shard.trainer.callbacks.repeat_samples import RepeatSamples as RepeatSamples
    from lightning_shard.trainer.callbacks.run_report import RunReport as RunReport
    from lightning_shard.trainer.callbacks.samples_per_second import (
        SamplesPerSecond as SamplesPerSecond,
    )
    from lightning_shard.trainer.callbacks.step_profile import StepProfile as StepProfile
    from lightning_shard.trainer.callbacks.stop_on_nonfinite import (
        StopOnNonFinite as StopOnNonFinite,
    )
    from lightning_shard.trainer.fabric import FabricShardStrategy as FabricShardStrategy
    from lightning_shard.trainer.strategy import HybridShardStrategy as HybridShardStrategy
    from lightning_shard.trainer.xpu.accelerator import XPUAccelerator as XPUAccelerator

__version__ = "0.1.0"

# for tools that read names without importing them; a test compares the three lists of this page
__all__ = [
    "Candidate",
    "Certificate",
    "Check",
    "Cluster",
    "DeviceTimer",
    "DisagreementError",
    "DomainTensor",
    "EpochReport",
    "FabricShardStrategy",
    "FieldDataset",
    "FieldFile",
    "FieldSink",
    "HybridShardStrategy",
    "ImageFile",
    "Layout",
    "LightningShardError",
    "Prediction",
    "PredictionWriter",
    "ProcessInfo",
    "Ranking",
    "RepeatSamples",
    "RunReport",
    "SamplesPerSecond",
    "SeriesDataset",
    "SeriesFile",
    "Setting",
    "ShardingOptions",
    "Slab",
    "StepProfile",
    "StopOnNonFinite",
    "StuckError",
    "Subdomain",
    "TiledStrategy",
    "Tiles",
    "UnsafeFileError",
    "UnsupportedOperationError",
    "VolumeDataset",
    "VolumeFile",
    "XPUAccelerator",
    "allow_function",
    "allow_gather",
    "best",
    "calibrate",
    "certify",
    "check",
    "clip_grad_norm_",
    "clip_grad_value_",
    "crossing_edges",
    "curve_order",
    "deferred_parameters",
    "find_mesh",
    "from_local",
    "functional",
    "gather",
    "in_tiles",
    "init_mesh",
    "knn",
    "launch",
    "load_weights",
    "local_map",
    "no_sync",
    "open_series",
    "ordered_graph",
    "parallelize",
    "plan",
    "predict",
    "predictions_in_order",
    "process_info",
    "radius",
    "read_cluster",
    "register_rule",
    "save_weights",
    "shard",
    "simulate",
    "slab_of",
    "spectral_method",
    "split_inputs",
    "start_process_group",
    "use_exact_random",
    "whole_parameters",
    "write_fields",
]

# the module of each public name, by theme
_MODULES = {
    # Lightning's Trainer
    "HybridShardStrategy": "trainer.strategy",
    "FabricShardStrategy": "trainer.fabric",
    "ShardingOptions": "fsdp.options",
    "XPUAccelerator": "trainer.xpu.accelerator",
    "PredictionWriter": "trainer.callbacks.predictions",
    "predictions_in_order": "trainer.callbacks.predictions",
    "EpochReport": "trainer.callbacks.epoch_report",
    "RepeatSamples": "trainer.callbacks.repeat_samples",
    "RunReport": "trainer.callbacks.run_report",
    "StopOnNonFinite": "trainer.callbacks.stop_on_nonfinite",
    "SamplesPerSecond": "trainer.callbacks.samples_per_second",
    "DeviceTimer": "trainer.callbacks.device_timer",
    "StepProfile": "trainer.callbacks.step_profile",
    # split tensors
    "DomainTensor": "tensor.tensor",
    "shard": "tensor.placement",
    "from_local": "tensor.placement",
    "gather": "tensor.placement",
    "functional": "tensor",
    "local_map": "tensor.escape",
    "allow_gather": "tensor.escape",
    "allow_function": "tensor.autograd_function",
    "split_inputs": "memory.split_inputs",
    # files of fields, of which a rank reads its part
    "slab_of": "data.slab",
    "Slab": "data.slab",
    "FieldSink": "data.field_sink",
    "FieldDataset": "data.readers.field_dataset",
    "FieldFile": "data.readers.field_file",
    "write_fields": "data.readers.field_file",
    "ImageFile": "data.readers.pictures",
    "SeriesDataset": "data.readers.series_dataset",
    "SeriesFile": "data.readers.series_file",
    "open_series": "data.readers.series_file",
    "VolumeDataset": "data.readers.volumes",
    "VolumeFile": "data.readers.volumes",
    # points and graphs
    "curve_order": "points.curve",
    "crossing_edges": "points.curve",
    "ordered_graph": "points.curve",
    "knn": "points.neighbours",
    "radius": "points.neighbours",
    # rules for operations
    "register_rule": "ops.registry",
    "Subdomain": "domain.subdomain",
    "Layout": "domain.layout",
    "UnsupportedOperationError": "domain.errors",
    "spectral_method": "ops.spectral.cost",
    "use_exact_random": "ops.elementwise.random",
    # parameters, gradients and weights
    "parallelize": "fsdp.parallelize",
    "whole_parameters": "fsdp.whole_parameters",
    "deferred_parameters": "fsdp.materialize",
    "no_sync": "fsdp.no_sync",
    "clip_grad_norm_": "fsdp.clip",
    "clip_grad_value_": "fsdp.clip",
    "load_weights": "checkpoint.weights",
    "save_weights": "checkpoint.weights",
    "UnsafeFileError": "checkpoint.errors",
    # processes and meshes
    "launch": "processes.launch",
    "simulate": "lab.simulate",
    "StuckError": "processes.errors",
    "start_process_group": "processes.start",
    "init_mesh": "processes.mesh",
    "find_mesh": "processes.mesh",
    "process_info": "processes.process_info",
    "ProcessInfo": "processes.variables",
    "DisagreementError": "processes.agreement",
    "LightningShardError": "processes.errors",
    # one device, a field many times its memory
    "in_tiles": "memory.in_tiles",
    "TiledStrategy": "lab.tiled_strategy",
    "Tiles": "tiles.tile_tensor",
    # a step, rehearsed on this machine
    "check": "lab.compare",
    "certify": "lab.compare",
    "Certificate": "lab.result",
    "Check": "lab.result",
    "plan": "lab.predict",
    "predict": "lab.predict",
    "Prediction": "lab.prediction",
    "best": "lab.search",
    "Ranking": "lab.ranking",
    "Candidate": "lab.ranking",
    "Setting": "lab.ranking",
    "read_cluster": "lab.clusters",
    "calibrate": "lab.calibrate",
    "Cluster": "lab.machine",
}

# opt_einsum (under neuraloperator) takes its backend from the package of its operands' class
_FOR_OPT_EINSUM = {"einsum", "tensordot", "transpose"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _FOR_OPT_EINSUM and "opt_einsum" in sys.modules:
        return getattr(importlib.import_module("opt_einsum.backends.torch"), name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = f"{__name__}.{_MODULES[name]}"
    if _MODULES[name].startswith("trainer."):
        _register()
    module = importlib.import_module(path)
    globals()[name] = getattr(module, name, None) or importlib.import_module(f"{path}.{name}")
    return globals()[name]


def _register() -> None:
    """Let the registries of Lightning know "xpu" and "hybrid_shard", which have no entry point."""
    for name in ("xpu.accelerator", "strategy", "fabric"):
        importlib.import_module(f"{__name__}.trainer.{name}")


def __dir__() -> list[str]:
    return sorted(_MODULES)


if is_imported():
    _register()
