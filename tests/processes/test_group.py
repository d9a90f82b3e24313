"""Ranks that differ, or do not come, end together with one sentence."""

import multiprocessing
import os
import re
import socket
import threading
import time
from operator import attrgetter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_shard import (
    FabricShardStrategy,
    HybridShardStrategy,
    RunReport,
    StepProfile,
    StopOnNonFinite,
    process_info,
    start_process_group,
)
from lightning_shard.processes import agreement
from lightning_shard.processes.agreement import agree
from lightning_shard.processes.start import join
from tests.training import loader, make, trainer


def agreed(facts, devices=(None,) * 3, timeout_s=20.0, worlds=(3, 3, 3), devices_seen=(None,) * 3):
    """What `agree` raises on each rank that there is."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    raised = {}

    def rank_main(rank):
        try:
            agree(
                clones[rank], "test", facts[rank], rank=rank, world_size=worlds[rank],
                remedy="do it", timeout_s=timeout_s, device=devices[rank],
                devices=devices_seen[rank],
            )  # fmt: skip
        except (ValueError, TimeoutError) as err:
            raised[rank] = str(err)

    clones = [store.clone() for _ in facts]
    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(facts))]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised, time.monotonic() - start


def test_ranks_that_agree():
    assert agreed([{"a": "1"}] * 3, devices=("0", "1", "2"))[0] == {}


@pytest.mark.parametrize(
    ("facts", "devices", "expected"),
    [
        ([{"a": "1"}, {"a": "1"}, {"a": "2"}], (None,) * 3, "a is 1 on rank 0 and 2 on rank 2; do"),
        ([{}, {"b": "x" * 300}, {}], (None,) * 3, "b is not there on rank 0 and xxx"),
        ([{}] * 3, ("gpu 0", "gpu 1", "gpu 1"), "ranks 1 and 2 use the same device, gpu 1"),
    ],
    ids=["values", "names", "devices"],
)
def test_difference_is_raised_on_all_ranks(facts, devices, expected):
    raised, seconds = agreed(facts, devices)
    assert len(raised) == 3
    assert all(expected in text and len(text) < 500 for text in raised.values())
    assert seconds < 10


@pytest.mark.slow
def test_ranks_that_do_not_come():
    raised, seconds = agreed([{}, {}], timeout_s=1.0)
    assert set(raised) == {0, 1}
    assert all("the ranks [2] of 3 have not arrived after 1 s" in t for t in raised.values())
    assert seconds < 10


@pytest.mark.slow
def test_who_is_waited_for_is_said(capfd, monkeypatch):
    monkeypatch.setattr(agreement, "CHECK_S", 0.1)
    monkeypatch.setattr(agreement, "WORD_S", 0.3)
    agreed([{}, {}], timeout_s=2.0)
    words = re.findall(r"rank 0 has waited \d s for the ranks (.*), and", capfd.readouterr().err)
    assert words[0] == "[2] of 3"
    assert len(words) < 4  # and not each second


def test_numbers_of_processes_that_differ():
    raised, _ = agreed([{}, {}, {}], worlds=(2, 2, 3))
    assert raised == {
        2: "the number of processes is 2 on rank 0 and 3 on rank 2; start all processes with the "
        "same number."
    }


def test_port_that_is_taken():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        options = {"device": torch.device("cpu"), "backend": "gloo", "timeout_s": 5.0}
        with pytest.raises(RuntimeError, match=rf"port 127.0.0.1:{port} is taken on this machine"):
            join(0, 2, f"127.0.0.1:{port}", **options)


def alone(rank, world, port, queue, changes):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    torch.set_num_threads(1)
    options = {"timeout_s": 60.0, **changes.pop("options", {})}
    try:
        version = changes.get("versions", {}).get(rank, torch.__version__)
        with mock.patch.object(torch, "__version__", version):
            if device := changes.get("device"):
                address = f"127.0.0.1:{port}"
                join(rank, world, address, device=device, backend="nccl", timeout_s=60.0)
            info = start_process_group("cpu", **options)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert info == process_info()
        queue.put((rank, float(total)))
    except Exception as err:
        queue.put((rank, f"{type(err).__name__}: {err}"))


def started(ranks, world, **changes):
    """What each rank finds or raises, and the seconds that takes."""
    context = multiprocessing.get_context("fork")
    queue, port = context.Queue(), 20000 + os.getpid() % 10000
    start = time.monotonic()
    processes = [
        context.Process(target=alone, args=(rank, world, port, queue, changes), daemon=True)
        for rank in ranks
    ]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=100) for _ in ranks)
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    return found, time.monotonic() - start


def test_script_without_trainer():
    assert started([0, 1], 2)[0] == {0: 2.0, 1: 2.0}


def test_different_versions_of_torch():
    found, seconds = started([0, 1], 2, versions={1: "1.0"})
    sentence = (
        f"DisagreementError: the version of torch is {torch.__version__} on rank 0 and 1.0 on rank"
    )
    assert all(text.startswith(sentence) for text in found.values()), found
    assert seconds < 30


def test_unknown_backend():
    found, _ = started([0, 1], 2, options={"backend": "cpu:glue"})
    assert found[0] == found[1]
    assert found[0].startswith("ValueError: process group backend 'cpu:glue': 'glue' is unknown")
    assert "gloo" in found[0]


@pytest.mark.spmd(2)
def test_a_group_that_runs_is_kept():
    before = dist.group.WORLD
    for backend in (None, "gloo"):
        info = start_process_group("cpu", backend=backend)
        assert (info.rank, info.world_size) == (dist.get_rank(), 2)
        assert dist.group.WORLD is before
    with pytest.raises(ValueError, match="runs already, and backend='mpi' is another"):
        start_process_group("cpu", backend="mpi")


def test_rank_that_is_not_started():
    found, seconds = started([0], 2, options={"timeout_s": 2.0})
    assert "TimeoutError: the ranks [1] of 2 have not arrived after 2 s" in found[0]
    found, _ = started([1], 2, options={"timeout_s": 2.0})
    assert "RuntimeError: rank 1 did not reach rank 0 at 127.0.0.1:" in found[1]
    assert seconds < 40


def test_two_processes_on_one_device():
    """As before NCCL's start, with the device's identity given: it needs no GPU."""
    with mock.patch("lightning_shard.processes.start._identity", return_value="H200 of host"):
        found, seconds = started([0, 1], 2, device=torch.device("cuda", 0))
    sentence = "DisagreementError: ranks 0 and 1 use the same device, H200 of host; start one"
    assert all(text.startswith(sentence) for text in found.values()), found
    assert seconds < 30


def test_no_device():
    kind = next(t for t in ("cuda", "xpu") if not getattr(torch, t).is_available())
    with pytest.raises(RuntimeError, match=f"no device of type '{kind}' for its 1 processes"):
        start_process_group(kind)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gradient_clip_val": (None, 1.0)}, "Trainer's gradient_clip_val is None on rank 0 and 1"),
        ({"max_epochs": (1, 2)}, "the Trainer's max_epochs is 1 on rank 0 and 2 on rank 1"),
        ({"reload_dataloaders_every_n_epochs": (0, 1)}, "_every_n_epochs is 0 on rank 0 and 1 on"),
    ],
    ids=["clip", "epochs", "reloads"],
)
def test_different_options_of_a_trainer(options, expected):
    rank = dist.get_rank()
    runner = trainer((2,), **{name: value[rank] for name, value in options.items()})
    with pytest.raises(ValueError, match=expected):
        runner.fit(make("simple_cnn", torch.float32), loader("simple_cnn", torch.float32, 2, 8))


FOR_ALL = {
    "StopOnNonFinite": StopOnNonFinite,
    "RunReport": RunReport,
    "StepProfile {'wait': 0.*'wait': 1": lambda: StepProfile(wait=dist.get_rank()),
    "ModelPruning": lambda: ModelPruning("l1_unstructured"),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", FOR_ALL)
def test_a_callback_of_one_rank_that_needs_all(name):
    """Its message would be paired with one of the gradients, or waited for until `timeout_s`."""
    alone = "wait" not in name and dist.get_rank() == 0
    runner = trainer((2,), callbacks=[] if alone else [FOR_ALL[name]()])
    with pytest.raises(ValueError, match=f"callbacks that need all ranks is .*{name}"):
        runner.fit(make("simple_cnn", torch.float32), loader("simple_cnn", torch.float32, 2, 8))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("kept", [None, {"": "weights.safetensors"}], ids=["none", "another part"])
def test_first_weights_of_one_rank(kept):
    """It would wait for the others, which train, until `timeout_s` has passed."""
    first = {"conv1": "weights.safetensors"} if dist.get_rank() == 1 else kept
    runner = trainer((2,), strategy={"init_weights_from": first})
    with pytest.raises(ValueError, match=r"parts with init_weights_from is \[.*\['conv1'\]"):
        runner.fit(make("simple_cnn", torch.float32), loader("simple_cnn", torch.float32, 2, 8))


@pytest.mark.spmd(2)
def test_a_checkpoint_of_one_rank():
    """As where only one node has the file: the other would begin anew."""
    runner = trainer((2,))
    path = "last.ckpt" if dist.get_rank() == 1 else None
    with pytest.raises(ValueError, match="begins with a checkpoint is False on rank 0 and True on"):
        runner.fit(
            make("simple_cnn", torch.float32),
            loader("simple_cnn", torch.float32, 2, 8),
            ckpt_path=path,
        )


@pytest.mark.spmd(2)
def test_different_modules():
    module = make("simple_cnn", torch.float32)
    if dist.get_rank() == 1:
        module.extra = torch.nn.Linear(3, 4)
    expected = r"extra.weight is not there on rank 0 and float32 \(4, 3\) on rank 1; start all"
    with pytest.raises(ValueError, match=expected):
        trainer((2,)).fit(module, loader("simple_cnn", torch.float32, 2, 8))
    module = make("simple_cnn", torch.float32)
    trainer((2,)).fit(module, loader("simple_cnn", torch.float32, 2, 8))  # nothing is left behind


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("layer", "options", "expected"),
    [
        ("act", {"__class__": torch.nn.Tanh}, "the class of act is ReLU on rank 0 and Tanh on"),
        ("act", {"training": False}, "act.training is True on rank 0 and False on rank 1"),
        ("first", {"padding_mode": "circular"}, "first.padding_mode is zeros on rank 0 and circ"),
        ("first.weight", {"requires_grad": False}, "first.weight is .*, frozen on rank 1"),
    ],
)
def test_different_layers(layer, options, expected):
    """Their parameters are alike, and each rank would compute another loss."""
    module = make("simple_cnn", torch.float32)
    module.first, module.act = torch.nn.Conv2d(1, 1, 3), torch.nn.ReLU()
    for name, value in options.items() if dist.get_rank() == 1 else ():
        setattr(attrgetter(layer)(module), name, value)
    with pytest.raises(ValueError, match=expected):
        trainer((2,)).fit(module, loader("simple_cnn", torch.float32, 2, 8))


@pytest.mark.spmd(2)
def test_callback_of_one_rank():
    """It averages weights, so it keeps a module that only its rank would shard."""
    averages = [StochasticWeightAveraging(0.01)] if dist.get_rank() == 1 else []
    with pytest.raises(ValueError, match="copies that callbacks keep of the module is 0 on rank 0"):
        trainer((2,), callbacks=averages).fit(
            make("simple_cnn", torch.float32), loader("simple_cnn", torch.float32, 2, 8)
        )


def sgd(parameters, odd):
    return torch.optim.SGD(parameters, lr=0.1 + odd)


def sgd_or_adam(parameters, odd):
    return (torch.optim.Adam if odd else torch.optim.SGD)(parameters, lr=0.1)


def of_some(parameters, odd):
    return torch.optim.SGD(parameters[odd:], lr=0.1)


def scheduled(parameters, odd):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1 + odd)]


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("make_optimizers", "expected"),
    [
        (sgd, r"lr of optimizer 0 \(group 0\) is 0.1 on rank 0 and 1.1 on rank 1"),
        (sgd_or_adam, "the class of optimizer 0 is SGD on rank 0 and Adam on rank 1"),
        (of_some, r"the number of parameters of optimizer 0 \(group 0\) is"),
        (scheduled, "step_size of schedule 0 is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_different_optimizers(make_optimizers, expected):
    """Their weights would drift apart."""
    module = make("simple_cnn", torch.float32)
    made = make_optimizers([*module.parameters()], dist.get_rank())
    module.configure_optimizers = lambda: made
    with pytest.raises(ValueError, match=expected):
        trainer((2,)).fit(module, loader("simple_cnn", torch.float32, 2, 8))


@pytest.mark.spmd(2)
def test_different_optimizers_of_fabric():
    fabric = Fabric(
        strategy=FabricShardStrategy(domain_parallel_size=2), accelerator="cpu", devices=2
    )
    fabric.launch()
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"momentum of optimizer 0 \(group 0\) is 0.0 on"):
        fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1, dist.get_rank() / 2))


@pytest.mark.spmd(2)
def test_launcher_that_started_other_processes():
    with pytest.raises(
        ValueError, match=r"started 2 processes, .* use Trainer\(devices=2, num_nodes=1\)"
    ):
        Trainer(
            accelerator="cpu",
            devices=3,
            strategy=HybridShardStrategy(),
            plugins=[TorchElasticEnvironment()],
        )
