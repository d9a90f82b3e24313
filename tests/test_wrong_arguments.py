"""A wrong argument of a public function ends in one sentence that says what was expected."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nested import nested_tensor

from lightning_shard import (
    HybridShardStrategy,
    ShardingOptions,
    TiledStrategy,
    from_local,
    gather,
    in_tiles,
    init_mesh,
    launch,
    load_weights,
    parallelize,
    register_rule,
    save_weights,
    shard,
    split_inputs,
    start_process_group,
)
from tests.parity import mesh_of

Value, Type = ValueError, TypeError
Wrong = tuple[Callable[..., Any], type[Exception], str]


def entered(context: Callable[..., Any]) -> Callable[..., Any]:
    """A function that enters a context which is made of its arguments."""

    def enter(*args: Any, **kwargs: Any) -> None:
        with context(*args, **kwargs):
            pass

    return enter


X = torch.ones(2, 1, 5, 4)
NET = nn.Linear(4, 4)
MODULE = "takes a torch.nn.Module, made and not its class, as its first argument; got"
DIM = "must be the number of a tensor dim, or a list with one for each mesh axis.*; got"

OF_ONE_PROCESS: dict[str, Wrong] = {
    "size as a word": (
        lambda: HybridShardStrategy(domain_parallel_size="2"), Value, "'auto'; got 'auto' and '2'",
    ),
    "size as a bool": (lambda: HybridShardStrategy(data_parallel_size=True), Value, "got True"),
    "dims as a word": (lambda: HybridShardStrategy(shard_dims="2"), Value, f"shard_dims {DIM} '2'"),
    "dims as a float": (lambda: TiledStrategy(2, shard_dims=[1.5]), Value, rf"{DIM} \[1.5\]"),
    "dims as a bool": (lambda: HybridShardStrategy(shard_dims={"x": True}), Value, f"{DIM} True"),
    "timedelta": (
        lambda: HybridShardStrategy(timeout_s=timedelta(seconds=3)), Value, "seconds, such as 1800",
    ),
    "endless": (lambda: start_process_group("cpu", timeout_s=float("inf")), Value, "got inf"),
    "launched for no time": (lambda: launch(print, timeout_s=0), Value, "timeout_s .* got 0"),
    "processes as a word": (lambda: launch(print, processes="2"), Value, "1 or more; got '2'"),
    "first weights": (
        lambda: HybridShardStrategy(init_weights_from=["a.pt"]), Value, "init_weights_from must be",
    ),
    "budget as a number": (lambda: TiledStrategy(2, tile_budget=8000), Value, '"8GB".*got 8000'),
    "flag as a word": (
        lambda: ShardingOptions(cpu_offload="False"), Value, "cpu_offload must be True or False",
    ),
    "shard_size 0": (lambda: ShardingOptions("hybrid", shard_size=0), Value, "from 1 on; got 0"),
    "prefetch": (lambda: ShardingOptions(prefetch=1.5), Value, "prefetch must be .*; got 1.5"),
    "a class of blocks": (lambda: ShardingOptions(wrap=nn.Conv2d), Type, "wrap must be names"),
    "classes of blocks": (
        lambda: ShardingOptions(activation_checkpointing=[nn.Conv2d]), Type, "pointing must be",
    ),
    "policy as a word": (lambda: ShardingOptions(mp_policy="bf16"), Value, "mp_policy must map"),
    "weights of a path": (lambda: save_weights("a.pt", NET), Type, f"weights {MODULE} 'a.pt'"),
    "weights of a class": (lambda: load_weights(nn.Linear, "a"), Type, f"{MODULE} the class Lin"),
    "tiles of a number": (lambda: entered(in_tiles)(2, 2), Type, f"in_tiles {MODULE} 2"),
    "methods in tiles": (
        lambda: entered(in_tiles)(NET, 2, methods=[NET.forward]), Type, "methods must be names",
    ),
    "rule of a name": (lambda: register_rule("svd"), Type, r"@register_rule\(torch.erfcx\); got"),
    "rule of nothing": (lambda: register_rule(), Type, r"got \(\)"),
    "gather of a list": (lambda: gather([X]), Type, "gather takes a tensor; got list"),
}  # fmt: skip

OF_A_MESH: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no mesh": (lambda mesh: shard(X, None, 2), Type, "must be a DeviceMesh.*; got None"),
    "no mesh for inputs": (lambda mesh: entered(split_inputs)(NET, None), Type, "DeviceMesh"),
    "no mesh for a module": (lambda mesh: parallelize(NET, None), Type, "must be a DeviceMesh"),
    "dims": (lambda mesh: shard(X, mesh, [2.0]), Value, rf"dims {DIM} \[2.0\]"),
    "dims of a part": (lambda mesh: from_local(X, mesh, None), Value, f"dims {DIM} None"),
    "dim as a bool": (lambda mesh: shard(X, mesh, True), Value, f"dims {DIM} True"),
    "size of a mesh": (lambda mesh: init_mesh({"domain": "2"}), Value, "must be whole numbers"),
    "device of a mesh": (
        lambda mesh: init_mesh({"domain": 2}, "cdua"), Value, "'cdua' is none that .* one of cpu",
    ),
    "sparse": (lambda mesh: shard(torch.eye(3).to_sparse(), mesh, 0), Type, r"x.to_dense\(\)"),
    "nested": (lambda mesh: shard(nested_tensor([X[0]]), mesh, 0), Type, "to_padded_tensor"),
    "a class": (lambda mesh: parallelize(nn.Linear, mesh), Type, f"{MODULE} the class Linear"),
    "inputs": (lambda mesh: entered(split_inputs)(mesh, NET), Type, "must be a DeviceMesh"),
    "an unknown part": (
        lambda mesh: parallelize(nn.Sequential(NET), mesh, loaded=["1"]),
        Value, r"Sequential has no submodule '1', which init_weights_from .* use one of '0'",
    ),
    "a method without a list": (
        lambda mesh: entered(split_inputs)(NET, mesh, methods="foward"),
        Value, "has no method 'foward'; did you mean 'forward'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ONE_PROCESS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_of_one_process(name):
    call, error, words = OF_ONE_PROCESS[name]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", OF_A_MESH)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype) st")
def test_of_a_mesh(name):
    call, error, words = OF_A_MESH[name]
    with pytest.raises(error, match=words):
        call(mesh_of(2))


def test_a_path_of_first_weights():
    strategy = HybridShardStrategy(init_weights_from=Path("weights.safetensors"))
    assert strategy.first_weights == {"": "weights.safetensors"}


def test_one_class_without_a_list():
    """A word is a size for activation_offload alone; it had meant all blocks here."""
    assert ShardingOptions(activation_checkpointing="Block").activation_checkpointing == ["Block"]


@pytest.mark.spmd(2)
def test_numbers_of_numpy_are_numbers():
    two, later = np.int64(2), np.float32(90)
    HybridShardStrategy(domain_parallel_size=two, shard_dims=[two], timeout_s=later)
    x = torch.randn(1, 1, 4, 3)
    assert shard(x, mesh_of(2), [two]).to_local().shape == (1, 1, 2, 3)
