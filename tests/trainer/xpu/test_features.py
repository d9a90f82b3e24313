"""Checkpoints, callbacks, offload and the command line on fake Intel GPUs."""

import contextlib
import csv
import datetime
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard import DeviceTimer, predictions_in_order
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.cli import main as cli
from lightning_shard.memory import offload
from lightning_shard.processes.errors_together import copy_from_first
from lightning_shard.trainer.random_state import random_state
from tests import training
from tests.checkpoint import tiny
from tests.checkpoint.tiny import SaveAt
from tests.fake_xpu import torch_xpu
from tests.pairs import choose
from tests.pool import SILENCE_S, free_port
from tests.trainer.featured import (
    BATCH,
    QUIET,
    Featured,
    assert_same_state,
    fit_sharded,
    loader,
    sample,
)
from tests.training import shared_path, strategy_of

meshes = pytest.mark.parametrize("domain", [(1,), (2,)], ids=["2x1", "1x2"])
FORMATS = ["single", "sharded", "async"]


class DropoutOnTheDevice(tiny.Tiny):
    """Dropout that draws on the device."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.drawn.append(torch.rand(2, device=self.device).tolist())
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.spmd(2, "xpu")
@pytest.mark.parametrize(("checkpoint_format", "domain"), choose(FORMATS, [(1,), (2,)]), ids=str)
def test_resumed_runs_equal_uninterrupted_ones(domain, checkpoint_format):
    """Bit for bit, dropout included: the random numbers of the device are in the checkpoint."""
    path = shared_path("middle.ckpt")
    written = {"checkpoint_format": checkpoint_format}
    torch.manual_seed(7)
    whole = DropoutOnTheDevice()
    losses, state, _ = tiny.fit(domain, SaveAt(path, 4), module=whole, **written)
    torch.manual_seed(7)
    torch.xpu.manual_seed(99)
    rest = DropoutOnTheDevice()
    resumed, resumed_state, _ = tiny.fit(domain, module=rest, path=path)
    assert len(losses) == 12
    assert resumed == losses[4:]
    assert rest.drawn == whole.drawn[4:]
    assert state.keys() == resumed_state.keys()
    assert all(torch.equal(state[key], resumed_state[key]) for key in state)


def runner_alone(**options):
    return Trainer(devices=1, plugins=LightningEnvironment(), **(QUIET | options))


def run(trainer, module, batch, path=None):
    trainer.fit(module, loader(batch), ckpt_path=path)
    return module


@pytest.mark.quick_rows("(1,)-True")
@pytest.mark.spmd(2, "xpu")
@pytest.mark.parametrize(("domain", "to_xpu"), choose([(1,), (2,)], [True, False]), ids=str)
def test_checkpoints_pass_between_xpu_and_cpu(domain, to_xpu):
    path, shared = shared_path("epoch.ckpt"), 2 // domain[0]
    one = {"max_epochs": 2, "accelerator": "cpu"}
    expected = run(runner_alone(**one), Featured(), BATCH)
    if to_xpu:
        if dist.get_rank() == 0:
            first = one | {"max_epochs": 1, "callbacks": [SaveAt(path, 6, "epoch")]}
            run(runner_alone(**first), Featured(), BATCH)
        dist.barrier()
        runner = training.trainer(domain, max_epochs=2)
        found = run(runner, Featured(), BATCH // shared, path)
    else:
        runner = training.trainer(domain, max_epochs=1, callbacks=[SaveAt(path, 6, "epoch")])
        run(runner, Featured(), BATCH // shared)
        saved = torch.load(path, weights_only=True)
        assert {v.device.type for v in saved["state_dict"].values()} == {"cpu"}
        found = run(runner_alone(**one), Featured(), BATCH, path)
    assert_same_state(found, expected)


@pytest.mark.quick_rows("2x1")
@pytest.mark.spmd(2, "xpu")
@meshes
def test_recomputed_activations_draw_the_same_dropout(domain):
    def trained(names):
        module, strategy = tiny.tiny(), {"activation_checkpointing": names}
        runner = training.trainer(domain, strategy=strategy)
        torch.manual_seed(4)
        runner.fit(module, tiny.loader(2 // domain[0]))
        return full_module_state(module)

    kept, again = trained([]), trained(["Dropout", "Conv1d"])
    assert all(torch.equal(again[key], kept[key]) for key in kept)


@contextlib.contextmanager
def pinned_bytes(**limits):
    """The bytes that offloaded blocks ask of the host, in a list."""
    asked, plain = [], offload.Driver.room

    def room(driver, memory, count):
        found = plain(driver, memory, count)
        assert all(part.is_pinned() for part in found.parts)
        asked.append(count)
        return found

    with (
        mock.patch.object(offload.Driver, "room", room),
        mock.patch.object(offload, "MOVER", offload.Mover(offload.Driver())),  # it knows no step
        mock.patch.multiple(offload, **limits),
    ):
        yield asked


@pytest.mark.slow
@pytest.mark.spmd(2, "xpu")
@pytest.mark.parametrize(
    ("domain", "ahead"), choose([(1,), (2,)], [1, offload.AHEAD_BYTES]), ids=str
)
def test_activations_on_the_host(domain, ahead):
    """They come back as they were."""

    def trained(names, **options):
        module, strategy = tiny.tiny(), {"activation_offload": names, **options}
        runner = training.trainer(domain, strategy=strategy)
        torch.manual_seed(4)
        runner.fit(module, tiny.loader(2 // domain[0]))
        return full_module_state(module)

    with pinned_bytes(SMALL_BYTES=0, AHEAD_BYTES=ahead) as moved:
        kept = trained([])
        assert not moved
        away = trained(["BatchNorm1d", "Conv1d"])
        assert sum(moved) > 0
        moved.clear()
        within = trained("64 B")
        assert sum(moved) > 0
        moved.clear()
        fits = trained(True)
        assert not moved  # the device has room for all
        with mock.patch.object(offload, "free_bytes", return_value=0):
            nothing_fits = trained(True)
    assert sum(moved) > 0
    assert all(torch.equal(away[key], kept[key]) for key in kept)
    for found in (within, fits, nothing_fits):
        assert all(torch.equal(found[key], kept[key]) for key in kept)


@pytest.mark.spmd(2, "xpu")
def test_memory_of_the_device_while_activations_are_on_the_host():
    """Twenty blocks hold on the device what is ahead, and three tensors that compute."""
    mib = 2**20
    values = torch.rand(mib // 4)

    def peak(block, away):
        net = nn.Sequential(*(block() for _ in range(20)))
        if away:
            offload.offload(net)
        x = values.to("xpu").requires_grad_()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        net(x).sum().backward()
        return (torch.accelerator.max_memory_allocated() - before) / mib, x.grad.cpu()

    streams = [torch.xpu.current_stream(), torch.xpu.Stream()]
    # the two newest stay; what sigmoids made is made again of each eighth
    for block, copies in ((lambda: nn.Softmax(-1), 18), (nn.Sigmoid, 3)):
        kept, wanted = peak(block, away=False)
        assert kept > 20
        # a thread that looks at frames, as `LoneWaits` does, keeps their tensors while it looks
        unseen = mock.patch.object(sys, "_current_frames", dict)
        with pinned_bytes(AHEAD_BYTES=2 * mib) as moved, unseen:
            for stream in streams:
                with stream:
                    moved.clear()
                    held, found = peak(block, away=True)
                    assert moved == copies * [mib]
                    assert held <= 6
                    assert torch.equal(found, wanted)
                    assert torch.accelerator.current_stream() == stream


@pytest.mark.slow
@pytest.mark.spmd(2, "xpu")
def test_checkpoints_hold_the_states_of_each_device():
    path = shared_path("epoch.ckpt")
    module = tiny.tiny(dropout=0.0)
    torch.xpu.manual_seed(20 + dist.get_rank())
    tiny.fit((1,), SaveAt(path, 12, "epoch"), module=module)
    states = torch.load(path, weights_only=True)["lightning_shard"]["random"]
    mine = random_state(torch.device("xpu", dist.get_rank()))["device"]
    assert torch.equal(states[dist.get_rank()]["device"], mine)
    assert not torch.equal(states[0]["device"], states[1]["device"])


@pytest.mark.spmd(2, "xpu")
def test_seed_everything_seeds_the_device():
    drawn = []
    for _ in range(2):
        seed_everything(5, verbose=False)
        drawn.append(torch.rand(3, device="xpu").cpu())
    assert torch.equal(*drawn)


@pytest.mark.spmd(2, "xpu")
def test_statistics_and_time_of_the_device():
    folder = shared_path("logs")
    timer, logger = DeviceTimer(), CSVLogger(folder)
    with mock.patch("builtins.print") as printed:
        fit_sharded(
            Featured(), (2,), callbacks=[DeviceStatsMonitor(cpu_stats=False), timer],
            logger=logger, log_every_n_steps=1,
        )  # fmt: skip
    assert 0 < timer.elapsed_s < 600
    lines = [call.args[0] for call in printed.call_args_list]
    told = [line for line in lines if line.startswith("Elapsed device time of training (xpu): ")]
    assert len(told) == (dist.get_rank() == 0)
    dist.barrier()
    (file,) = Path(folder).rglob("metrics.csv")
    rows = list(csv.DictReader(file.open()))
    name = "DeviceStatsMonitor.on_train_batch_end/"
    measured = [row for row in rows if row.get(f"{name}allocated_bytes.all.current")]
    assert len(measured) == 6
    assert all(float(row[f"{name}allocated_bytes.all.current"]) > 0 for row in measured)
    assert all(float(row[f"{name}free_bytes"]) < 2**32 for row in measured)
    assert all(float(row[f"{name}total_bytes"]) == 2**32 for row in measured)


@contextlib.contextmanager
def without_a_group():
    """For what the Trainer makes a group of its own; the pool's is back afterwards."""
    backend, device = dist.get_backend(), torch.device("xpu", dist.get_rank())
    ports = [free_port(), free_port()]
    dist.broadcast_object_list(ports)
    environment = {"MASTER_PORT": str(ports[0])}
    dist.destroy_process_group()
    try:
        with mock.patch.dict("os.environ", environment):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        with mock.patch.dict("os.environ", {"MASTER_PORT": str(ports[1])}):
            silence = datetime.timedelta(seconds=SILENCE_S)
            dist.init_process_group(backend, timeout=silence, device_id=device)


@pytest.mark.quick_rows("2x1")
@pytest.mark.spmd(2, "xpu")
@meshes
def test_offload(domain):
    """Shards and all that belongs to them are in the CPU's pinned memory; blocks compute on XPU."""
    expected, module, places = Featured(), Featured(), set()
    run(runner_alone(accelerator="cpu"), expected, BATCH)
    forward = module.network.forward

    def look(x):
        places.update({x.device.type, *(p.device.type for p in module.network.parameters())})
        return forward(x)

    module.network.forward = look
    path = shared_path("offloaded.ckpt")
    with without_a_group():
        runner = Trainer(
            **(QUIET | {"accelerator": "xpu", "devices": 2}),
            plugins=TorchElasticEnvironment(),
            strategy=strategy_of(domain, {"cpu_offload": True}),
            callbacks=[SaveAt(path, 6, "epoch")],
        )
        run(runner, module, BATCH * domain[0] // 2)
        assert dist.get_backend_config() == "cpu:gloo,xpu:xccl"
        assert dist.group.WORLD.bound_device_id == torch.device("xpu", dist.get_rank())
        local = module.network[0].weight.to_local()
        assert local.device.type == "cpu"
        assert local.is_pinned()
        assert places == {"xpu"}
        assert_same_state(module, expected)
    saved = torch.load(path, weights_only=True)["state_dict"]
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(saved[key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.spmd(2, "xpu")
def test_offload_over_a_group_of_the_device_only_is_refused():
    with pytest.raises(RuntimeError, match="'cpu:gloo,xpu:xccl', or let the Trainer make it"):
        fit_sharded(Featured(), (1,), strategy={"cpu_offload": True})


class Stream(IterableDataset):
    """As many samples as the rank has."""

    def __iter__(self):
        return iter([sample(i) for i in range(4 + 2 * dist.get_rank())])


@pytest.mark.spmd(2, "xpu")
def test_streams_of_uneven_length_end_together():
    runner = training.trainer((1,))
    runner.fit(Featured(), DataLoader(Stream(), 2))
    assert runner.global_step == 2


@pytest.mark.quick_rows("2x1")
@pytest.mark.spmd(2, "xpu")
@meshes
def test_evaluation_and_prediction(domain):
    module, alone = Featured(), runner_alone(accelerator="cpu")
    batch = BATCH * domain[0] // 2
    expected = alone.validate(module, loader(BATCH), verbose=False)[0]
    outputs = torch.cat(alone.predict(module, DataLoader(loader(BATCH).dataset, 5)))
    runner = training.trainer(domain)
    found = runner.validate(module, loader(batch), verbose=False)[0]
    assert found == pytest.approx(expected, rel=1e-6)
    predicted = runner.predict(module, DataLoader(loader(BATCH).dataset, 5))
    in_order = torch.stack(predictions_in_order(runner, predicted))
    torch.testing.assert_close(in_order, outputs.squeeze(0), rtol=1e-9, atol=1e-11)


@pytest.mark.quick_rows("2x1")
@pytest.mark.spmd(2, "xpu")
@meshes
def test_collectives_are_of_the_device(domain):
    torch_xpu.forget_calls()
    fit_sharded(Featured(), domain, strategy={"sharding": "full"})
    ran = torch_xpu.calls()
    assert ran["c10d::_allgather_base_"]
    assert ran["c10d::_reduce_scatter_base_"]
    assert bool(ran.get("c10d::alltoall_base_")) == (domain == (2,))


@pytest.mark.spmd(2, "xpu")
def test_values_of_the_cpu_are_reduced_over_the_device():
    """xccl refuses them; and it has no mean of integers."""
    rank = dist.get_rank()

    class Reduce(Featured):
        def on_train_end(self):
            reduce, gather = self.trainer.strategy.reduce, self.trainer.strategy.all_gather
            self.found = [
                reduce(torch.tensor(1.0 + rank)), reduce(torch.tensor(3 + rank)),
                reduce(torch.tensor(1 + rank), reduce_op="sum"), gather(torch.tensor(rank)),
            ]  # fmt: skip

    module = Reduce()
    fit_sharded(module, (1,), max_steps=1)
    assert [x.tolist() for x in module.found] == [1.5, 3, 3, [0, 1]]
    assert [x.device.type for x in module.found] == ["cpu", "cpu", "cpu", "xpu"]
    kept = torch.full((2,), 5.0 + rank, dtype=torch.complex64)
    copy_from_first(kept)
    assert kept.tolist() == [5, 5]


@pytest.mark.slow
@pytest.mark.spmd(2, "xpu")
def test_mnist_on_the_command_line(tmp_path):
    config = Path(__file__).parents[3] / "configs" / "mnist_xpu.yaml"
    words = [
        "fit", "--config", str(config), "--trainer.max_steps=1", "--trainer.limit_val_batches=1",
        "--trainer.limit_test_batches=1", f"--trainer.default_root_dir={tmp_path}",
        "--data.init_args.batch_size=4", "--data.init_args.eval_batch_size=8",
    ]  # fmt: skip
    with mock.patch("builtins.print") as printed:
        cli.main(words)
    lines = [str(call.args[0]) for call in printed.call_args_list if call.args]
    told = [line for line in lines if line.startswith("Elapsed device time of training (xpu): ")]
    assert len(told) == (dist.get_rank() == 0)
    assert list(tmp_path.rglob("last.ckpt"))


@pytest.mark.spmd(2, "xpu")
def test_the_program_of_the_documentation(tmp_path):
    """That of docs/coming_from.md, with the module and the data of README's program."""
    root = Path(__file__).parents[3]
    (program,) = blocks_of((root / "README.md").read_text(), "run: script")
    (here,) = blocks_of((root / "docs/coming_from.md").read_text(), "run: xpu")
    names = {"__name__": "train"}
    with contextlib.chdir(tmp_path):
        exec(program, names)
        names |= {"MyModule": names["Shift"], "MyData": names["Fields"]}
        exec(here, names)
    assert names["trainer"].global_step == 4  # 32 samples, in batches of 4, on two replicas
    assert names["trainer"].strategy.root_device.type == "xpu"


def blocks_of(text, mark):
    """The blocks of a page that are marked so."""
    return re.findall(rf"^<!-- {mark} -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
