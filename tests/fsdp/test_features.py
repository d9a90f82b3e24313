"""One row per option of FSDP: on every mesh, training equals that of one process."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_shard
from lightning_shard import HybridShardStrategy, ShardingOptions
from lightning_shard.memory import recompute
from tests import training
from tests.fsdp.network import (
    Block,
    assert_equal_runs,
    is_block,
    net,
    sample,
    train_alone,
    train_sharded,
)
from tests.pairs import choose
from tests.parity import mesh_of

ROWS = {
    "full": {},
    "gradients": {"sharding": "gradients", "wrap": ["Block"]},
    "none": {"sharding": "none", "wrap": ["Block"]},
    "hybrid": {"sharding": "hybrid", "shard_size": 4, "wrap": ["Block"]},
    "wrap by class": {"wrap": ["Block"]},
    "wrap by nested classes": {"wrap": ["Block", "Conv2d"]},
    "wrap by function": {"wrap": is_block},
    "wrap by size": {"min_num_params": 300},
    "ignored": {"wrap": ["Block"], "ignored_parameters": ["*.norm.weight", "shift"]},
    "prefetch": {"wrap": ["Block"], "prefetch": 2},
    "checkpointing of blocks": {"wrap": ["Block"], "activation_checkpointing": True},
    "checkpointing by class": {"activation_checkpointing": ["Block"]},
    "checkpointing that keeps": {
        "wrap": ["Block"], "activation_checkpointing": True, "checkpoint_keeps": ["convolution"],
    },
    "activations on the host": {"wrap": ["Block"], "activation_offload": True},
    "all activations on the host": {"wrap": ["Block"], "activation_offload": "0GB"},
    "activations within a budget": {
        "wrap": ["Block"], "activation_offload": "1 kB", "activation_checkpointing": ["GroupNorm"],
    },
    "offload": {"wrap": ["Block"], "cpu_offload": True},
}  # fmt: skip
rows = pytest.mark.parametrize("row", ROWS)
# the other rows choose blocks in other ways, and keep the same kinds of parameters
WITH_A_DOMAIN = ["hybrid", "activations within a budget"]
ON_REPLICAS = [  # the others are much like one of these, or tested with a domain
    "full", "gradients", "wrap by function", "wrap by size", "ignored", "prefetch",
    "checkpointing by class", "checkpointing that keeps", "activations on the host", "offload",
]  # fmt: skip


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "row", choose([row for row in ROWS if row != "hybrid"], fast=ON_REPLICAS)
)  # hybrid is of four ranks
def test_on_two_data_replicas(row):
    assert_equal_runs(train_sharded((1,), ROWS[row]), train_alone())


@pytest.mark.slow
@pytest.mark.spmd(4)
@rows
def test_on_four_data_replicas(row):
    assert_equal_runs(train_sharded((1,), ROWS[row]), train_alone())


@pytest.mark.quick_rows("full")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("row", choose(["full", "none", "hybrid"], fast=["full", "hybrid"]))
def test_on_a_domain_of_two_dims(row):
    assert_equal_runs(train_sharded((2, 2), ROWS[row]), train_alone())


@pytest.mark.spmd(4)
@pytest.mark.parametrize("row", choose(ROWS, fast=WITH_A_DOMAIN))
def test_with_a_domain_accumulation_and_clipping(row):
    """Gradients that wait for the next step are exact for every kind of parameter."""
    found = train_sharded((2,), ROWS[row], accumulate_grad_batches=2, gradient_clip_val=0.05)
    assert_equal_runs(found, train_alone(accumulate=2, clip=0.05))


@pytest.mark.quick_rows("full")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("row", ["full", "ignored"])
def test_clipping_by_value(row):
    options = {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}
    assert_equal_runs(
        train_sharded((2,), ROWS[row], **options), train_alone(clip=0.003, value=True)
    )


@pytest.mark.quick_rows("1")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("shard_size", [1, 2])
def test_hybrid_of_two_ranks(shard_size):
    options = {"sharding": "hybrid", "shard_size": shard_size}
    assert_equal_runs(train_sharded((1,), options), train_alone())


@pytest.mark.spmd(4)
def test_mesh_of_hybrid():
    """The axes have names in user code, as those of the plain mesh."""
    seen = {}

    class Look(Callback):
        def on_fit_start(self, trainer, module):
            mesh = module.device_mesh
            seen.update({name: mesh[name].size() for name in (*mesh.mesh_dim_names, "data")})

    module = net()
    options = {"sharding": "hybrid", "shard_size": 2}
    train_sharded((2,), options, module, callbacks=[Look()], limit_train_batches=1)
    assert seen == {"replicate": 2, "shard": 1, "domain": 2, "data": 2}
    assert module.stem.weight.device_mesh.mesh_dim_names == ("copies", "parts")
    assert module.stem.weight.to_local().shape[0] == 3  # of 6 rows


@pytest.mark.quick_rows("none")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("sharding", ["full", "gradients", "none", "hybrid"])
def test_what_a_rank_holds(sharding):
    """Parameters, gradients and optimizer state at the end, in elements of the whole."""
    shard_size = {"hybrid": 2}.get(sharding)
    held = {}

    class Count(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            optimizer = trainer.optimizers[0]
            state = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
            grads = [p.grad for p in module.parameters()]
            for name, tensors in {"p": module.parameters(), "g": grads, "s": state}.items():
                held[name] = sum(t.to_local().numel() for t in tensors if isinstance(t, DTensor))

    options = {"sharding": sharding, "shard_size": shard_size, "wrap": ["Block"]}
    train_sharded((1,), options, module := net(), callbacks=[Count()])
    whole = sum(p.numel() for p in module.parameters() if isinstance(p, DTensor))
    part = {"none": 1, "hybrid": 2}.get(sharding, 4)
    assert total_over_ranks(held["p"]) == whole * 4 // part
    assert held["g"] == held["p"]
    assert held["s"] == 2 * held["p"]


def total_over_ranks(number: int) -> int:
    """The sum over ranks."""
    count = torch.tensor(number)
    dist.all_reduce(count)
    return int(count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding": "zero"}, "sharding must be one of 'auto', 'none', .* got"),
        ({"shard_size": 2}, "shard_size 2 needs sharding 'hybrid'; got sharding 'full'"),
        ({"wrap": ["Block"], "min_num_params": 9}, "both choose the blocks; give one of them"),
        ({"prefetch": 0}, "prefetch must be a whole number from 1 on; got 0"),
        ({"mp_policy": {"dtype": "bfloat16"}}, "mp_policy has no field 'dtype'; its fields are"),
        ({"mp_policy": {"param_dtype": "int8"}}, "must be a floating-point dtype"),
        ({"checkpoint_keeps": ["mm"]}, "give activation_checkpointing, too"),
        (
            {"activation_checkpointing": True, "checkpoint_keeps": ["convolutio"]},
            "checkpoint_keeps: torch.ops.aten has no operator 'convolutio'",
        ),
        (
            {"activation_checkpointing": True, "checkpoint_keeps": ["mm"], "compile_blocks": True},
            "cannot see the operators inside of the graphs",
        ),
        ({"activation_offload": True, "compile_blocks": True}, "cannot move what compile_blocks"),
        ({"activation_offload": True, "activation_checkpointing": True}, "nothing to move"),
        ({"activation_offload": "1 GiB", "compile_blocks": True}, "cannot move what compile_bl"),
        (
            {"activation_offload": "T5Block"},
            "must be a size such as \"8GB\" .* got 'T5Block'. Name",
        ),
        ({"activation_offload": "-1GB"}, "must be a size"),
    ],
    ids=str,
)
def test_refused_values(options, message):
    with pytest.raises(ValueError, match=message):
        training.strategy_of((1,), options)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"wrap": ["Blok"]},
            r"wrap: the network has no module of class 'Blok'; did you mean Block",
        ),
        ({"wrap": ["Xyz"]}, "no module of class 'Xyz'; its classes are Block, Conv2d, GroupNorm"),
        ({"ignored_parameters": ["*.nrm.*"]}, "no parameter's name fits '\\*.nrm.\\*'; names here"),
        (
            {"activation_checkpointing": ["Block"], "activation_offload": ["Conv2d", "Block"]},
            "nothing to move in (Conv2d|Block), which activation_checkpointing computes again",
        ),
        ({"sharding": "hybrid", "shard_size": 3}, r"shard_size 3 must be .* use one of \[1, 2\]"),
    ],
    ids=str,
)
def test_refused_with_the_module(options, message):
    with pytest.raises(ValueError, match=message):
        train_sharded((1,), options)


@pytest.mark.spmd(2)
def test_checkpointing_computes_again():
    """Twice as many forwards of the blocks as without, and names as before."""
    calls = []
    module = net()
    for block in module.blocks:
        block.conv.register_forward_hook(lambda *_: calls.append(1))
    options = {"wrap": ["Block"], "activation_checkpointing": ["Block"]}
    _, state = train_sharded((2,), options, module, limit_train_batches=1)
    assert len(calls) == 2 * len(module.blocks)
    assert state.keys() == net().state_dict().keys()
    with pytest.raises(ValueError, match="activation_checkpointing: the network has no module"):
        train_sharded((2,), {"activation_checkpointing": ["Blocks"]})


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("keeps", "convolutions", "norms"),
    [(None, 1, 1), ((), 2, 2), (("convolution",), 1, 2)],
    ids=["plain", "all", "selective"],
)
def test_what_is_computed_again(keeps, convolutions, norms):
    block, x = Block(6).double(), torch.randn(1, 6, 9, 4, dtype=torch.float64)
    if keeps is not None:
        recompute.recompute([block], keeps)
    split = lightning_shard.shard(x, mesh_of(2), 2).requires_grad_()
    with Operators() as seen:
        block(split).square().sum().backward()
    assert seen.calls["aten.convolution.default"] == convolutions
    assert seen.calls["aten.native_group_norm.default"] == norms


class IntoMemory(torch.nn.Module):
    """A product that is written into memory of its own, and one that is returned."""

    def forward(self, x):
        written = torch.empty_like(x)
        with torch.no_grad():
            torch.mm(x, x, out=written)
        return torch.mm(x, x) * written


def test_a_kept_operator_that_writes_into_given_memory_is_computed_again():
    """Its result is that memory, so of what is kept nothing would be written there."""
    x = torch.randn(4, 4, dtype=torch.float64)
    plain, kept = x.clone().requires_grad_(), x.clone().requires_grad_()
    IntoMemory()(plain).sum().backward()
    block = IntoMemory()
    recompute.recompute([block], ["mm"])
    with Operators() as seen:
        block(kept).sum().backward()
    assert seen.calls["aten.mm.out"] == 2
    torch.testing.assert_close(kept.grad, plain.grad)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["2x1", "1x2"])
def test_compiled_blocks(domain):
    torch._dynamo.reset()
    options = {"wrap": ["Block"], "compile_blocks": True}
    assert_equal_runs(train_sharded(domain, options), train_alone())


def test_options_from_a_file(tmp_path):
    """Those that are more than a number or a word, as YAML writes them."""
    config = {
        "mode": "hybrid", "shard_size": 2, "wrap": "tests.fsdp.network.is_block",
        "mp_policy": {"param_dtype": "bfloat16", "cast_forward_inputs": False},
        "activation_checkpointing": ["Block"], "ignored_parameters": ["*.bias"],
    }  # fmt: skip
    check_options(from_file(tmp_path, {"sharding": config}))


def test_a_mode_alone(tmp_path):
    assert from_file(tmp_path, {"sharding": "none"}).sharding_options == ShardingOptions("none")
    assert from_file(tmp_path, {}).sharding_options == ShardingOptions("auto")


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrapped'"):
        HybridShardStrategy(wrapped=["Block"])


def from_file(folder, config):
    parser = ArgumentParser()
    parser.add_class_arguments(HybridShardStrategy, "strategy")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"strategy": config}))
    return parser.instantiate(parser.parse_path(path)).strategy


def check_options(strategy):
    options = strategy.sharding_options
    assert options.mode == "hybrid"
    assert options.wrap is is_block
    assert options.policy == MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    assert options.activation_checkpointing == ["Block"]
    assert options.ignored_parameters == ["*.bias"]
    assert strategy.processes.shard_size == 2


@pytest.mark.quick_rows("none")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_training_after_inference_mode(sharding):
    """A user's forward under inference mode, before FSDP2 has seen its parameters."""

    class Look(Callback):
        def on_train_start(self, trainer, module):
            with torch.inference_mode():
                module(sample(0)[None, :1])

    options = {"sharding": sharding, "wrap": ["Block"]}
    assert_equal_runs(train_sharded((1,), options, callbacks=[Look()]), train_alone())


SPECTRAL = {
    "gradients": {"sharding": "gradients"},
    "none": {"sharding": "none"},
    "hybrid": {"sharding": "hybrid", "shard_size": 4},
    "ignored": {"ignored_parameters": ["*convs.0.weight.*", "*bias"]},
    "recomputed": {"activation_checkpointing": ["SpectralConv"]},
}


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("row", "domain"),
    [
        ("none", (2,)),
        ("recomputed", (2,)),
        *(
            pytest.param(row, domain, marks=pytest.mark.slow)
            for row, domain in [
                ("gradients", (2,)),
                ("hybrid", (2,)),
                ("ignored", (2,)),
                ("hybrid", (2, 2)),
                ("none", (2, 2)),
            ]
        ),
    ],
)
def test_spectral_weights_that_are_split_by_mode(row, domain):
    """They are in a group of their own, over data replicas only."""
    options = {"strategy": SPECTRAL[row], "accumulate_grad_batches": 2}
    found = training.train_sharded("dense_fno", torch.float64, 4, domain, **options)
    wanted = training.train_alone("dense_fno", torch.float64, 4, accumulate=2)
    assert_equal_runs(found, wanted)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_hybrid_of_two_nodes_with_a_domain_and_modes():
    """All three axes of the mesh are there."""
    options = {"strategy": {"sharding": "hybrid", "shard_size": 2}}
    found = training.train_sharded("dense_fno", torch.float64, 4, (2,), **options)
    assert_equal_runs(found, training.train_alone("dense_fno", torch.float64, 4))


@pytest.mark.spmd(2)
def test_ignored_spectral_weights_stay_whole():
    module = training.make("dense_fno", torch.float64)
    runner = training.trainer((2,), strategy=SPECTRAL["ignored"], max_steps=1)
    runner.fit(module, training.loader("dense_fno", torch.float64, 4, 8))
    first, second = (conv.weight._parameters["tensor"] for conv in module.network.fno_blocks.convs)
    assert not isinstance(first, DTensor)
    assert isinstance(second, DTensor)
    assert [p.grad is not None for p in (first, second)] == [True, True]
