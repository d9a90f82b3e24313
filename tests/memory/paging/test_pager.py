"""A pager on the CPU: what is away, what comes back, what is copied, and that numbers stay."""

import copy
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lightning_shard.memory.paging.file_memory import FileMemory
from lightning_shard.memory.paging.host_memory import Memory
from lightning_shard.memory.paging.pager import Pager
from lightning_shard.processes.torch_private.internals import (
    FakeTensorMode,
    without_modes,
)

CPU = torch.device("cpu")
ROWS = 64  # of fields of 16 float64 each: 8 KiB


def pager_of(budget=None, **options):
    return Pager(CPU, budget, small=1024, **options)


def is_away(tensor):
    return tensor.untyped_storage().nbytes() == 0


def send_all(pager):
    with without_modes():
        pager.send_all()


def field(seed=0):
    return torch.randn(ROWS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))]
    return nn.Sequential(*(copy.deepcopy(layers[0]) for _ in range(6))).double()


def step(net):
    """Gradients of a loss, with a block that is recomputed."""
    x = field().requires_grad_()
    y = net[0](x).tanh()
    y = checkpoint(net[1], y, use_reentrant=False)
    for block in net[2:]:
        y = y + block(y)
    loss = y.square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in net.parameters())]


def second_order(net):
    x = field().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    return [grad.detach().clone(), *(p.grad for p in net.parameters() if p.grad is not None)]


def without_gradients(net):
    with torch.no_grad():
        kept = net(field())
    with torch.inference_mode():
        return [kept, net(field(1)).clone()]


def two_steps_of_adam(net):
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for number in range(2):
        optimizer.zero_grad()
        net(field(number)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("program", [step, second_order, without_gradients, two_steps_of_adam])
@pytest.mark.parametrize("budget", [2**15, 2**18, 2**30])
def test_numbers_are_those_without(program, budget, tmp_path):
    wanted = program(network())
    memory = FileMemory(tmp_path) if budget == 2**15 else None
    pager, net = pager_of(budget, memory=memory), network()
    with pager.paging():
        found = [tensor.clone() for tensor in program(net)]
    torch.testing.assert_close(found, [w.clone() for w in wanted], rtol=0, atol=0)
    if budget != 2**18:
        assert (pager.pages.out > 0) == (budget == 2**15)
        assert (pager.pages.back > 0) == (budget == 2**15)


def test_no_more_is_near_than_the_budget():
    """But for the tensors of the operator that runs, and but for its first run of unknown size."""
    pager, net, near = pager_of(2**17), network(), []
    end = pager.end

    def watched(*args):
        end(*args)
        near.append(pager.pages.near)

    for seen in (False, True):
        with pager.paging(), mock.patch.object(pager, "end", watched):
            step(net)
        assert not seen or max(near) <= 2**17
    assert max(near) > 2**16
    net.zero_grad()
    assert pager.pages.near == pager.pages.memory.held == 0
    assert pager.pages.known == {}


def test_all_leave_where_all_are_sent():
    pager = pager_of()
    with pager.paging():
        kept = field() * 2
        view = kept[3:, :5].t()
        small = torch.ones(4)
        send_all(pager)
        assert is_away(kept)
        assert not is_away(small)
        assert kept.shape == (ROWS, 16)
        detached = kept.detach()  # looks at no byte
        assert is_away(kept)
        assert torch.equal(view, (field() * 2)[3:, :5].t())
        assert not is_away(detached)
    assert (pager.pages.out, pager.pages.back) == (kept.nbytes, kept.nbytes)


WRITES = {
    "read": (lambda x: x.sum(), 1),
    "in place": (lambda x: x.add_(1), 2),
    "a view": (lambda x: x[2:].zero_(), 2),
    "out": (lambda x: torch.add(x, 1, out=x), 2),
    "lists": (lambda x: torch._foreach_add_([x, torch.ones(ROWS, 16)], 1.0), 2),
    "lists, read": (lambda x: torch._foreach_add([x], 1.0), 1),
    "copy": (lambda x: x.copy_(torch.zeros(16)), 2),
    "statistics": (lambda x: F.batch_norm(field()[:, :1].expand(64, x.numel()), x.flatten(),
                                          x.flatten() ** 2, training=True), 2),
    "indices": (
        lambda x: x.index_put_((torch.tensor([1]),), torch.zeros(16, dtype=x.dtype)), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("write", "copies"), WRITES.values(), ids=WRITES)
def test_only_what_was_written_is_copied_again(write, copies):
    pager, plain = pager_of(), field() + 1
    write(plain)
    with pager.paging():
        kept = field() + 1
        send_all(pager)
        assert pager.pages.out == kept.nbytes
        write(kept)
        send_all(pager)
        assert pager.pages.out == copies * kept.nbytes
        assert is_away(kept)
        assert pager._page(kept).host is not None
        pager.bring(kept)
    assert torch.equal(kept, plain)


def test_the_host_holds_each_storage_once():
    pager = pager_of()
    with pager.paging():
        kept = field() * 2
        views = [kept, kept[1:], kept.t(), kept.view(-1)]
        for _ in range(3):
            send_all(pager)
            assert torch.equal(views[2], (field() * 2).t())
        assert pager.pages.memory.peak == kept.nbytes
        assert pager.pages.out == kept.nbytes
    del kept, views
    assert pager.pages.memory.held == pager.pages.near == 0
    assert pager.pages.known == {}


def test_memory_that_is_handed_out_stays():
    """NumPy, DLPack and kernels that take addresses run no operators."""
    pager = pager_of()
    hand_out = [
        lambda x: x.numpy(), lambda x: x.data_ptr(), torch.from_dlpack,
        lambda x: memoryview(x.numpy()),
    ]  # fmt: skip
    for use in hand_out:
        with pager.paging():
            kept = field() * 2
            send_all(pager)
            assert is_away(kept)
            seen = use(kept)
            send_all(pager)
            assert not is_away(kept), use
        assert torch.equal(kept, field() * 2)
        del seen
    assert isinstance(field().numpy().sum(), float)


def test_tolist_and_numbers_are_read():
    pager, wanted = pager_of(), field() * 2
    with pager.paging():
        kept = field() * 2
        send_all(pager)
        assert kept.tolist() == wanted.tolist()
        send_all(pager)
        assert kept[3, 4].item() == wanted[3, 4].item()
        send_all(pager)
        assert str(kept) == f"{kept}" == str(wanted)


def test_an_owner_that_no_one_told_of():
    """Memory that its owner freed, or took back, is not filled with an old copy."""
    pager = pager_of()
    with pager.paging():
        kept = torch.zeros(ROWS, 16)
        storage = kept.untyped_storage()
        storage.resize_(0)
        send_all(pager)
        storage.resize_(kept.nbytes)
        kept.fill_(3)
        send_all(pager)
        assert is_away(kept)
        storage.resize_(kept.nbytes)
        kept.fill_(5)
        assert kept.sum() == 5 * kept.numel()


def test_collectives_are_computed_on_the_host():
    pager, written = pager_of(), torch.ones(ROWS, 16)
    with pager.paging():
        first, second = torch.zeros(ROWS, 16), torch.zeros(ROWS, 16)
        with pager.on_host({"a": [first[1:]], "b": second.t(), "c": written}) as hosted:
            assert is_away(first)
            assert is_away(second)
            hosted["a"][0].fill_(2)
            hosted["b"].copy_(torch.arange(ROWS))
            assert hosted["c"] is written
        assert first.sum() == 2 * first[1:].numel()
        assert torch.equal(second[:, 7], torch.arange(ROWS).float())


def test_small_collectives_stay_on_the_device_within_a_budget():
    """What little of the budget is brought is written there, and its old copy is forgotten."""
    pager = pager_of(16 * field().nbytes)
    with pager.paging():
        first, second, large = field() * 0, field() * 2, torch.zeros(3 * ROWS, 16)
        send_all(pager)
        with pager.on_host([first, second]) as brought:
            assert brought[0] is first
            assert not is_away(first)
            first.copy_(second)
            assert is_away(large)
        send_all(pager)
        assert torch.equal(first, field() * 2)  # a copy of what was written
        send_all(pager)
        with pager.on_host([large, first]) as hosted:
            assert is_away(large)
            hosted[0].fill_(1)
        assert large.sum() == large.numel()
    assert all(page.pins == 0 for page in pager.pages.known.values())


def test_an_operator_that_finds_no_memory_runs_again():
    """After everything else has left; what writes into its arguments does not run twice."""
    calls = []

    @torch.library.custom_op("lightning_shard_test::greedy", mutates_args=())
    def greedy(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return x * 3

    @torch.library.custom_op("lightning_shard_test::greedy_", mutates_args=("x",))
    def greedy_(x: torch.Tensor) -> None:
        calls.append(x.shape)
        raise torch.OutOfMemoryError("no memory")

    pager = pager_of(2**20)
    with pager.paging():
        kept, other = field() * 2, field() * 4
        assert torch.equal(greedy(kept), field() * 6)
        assert is_away(other)
        assert not is_away(kept)
        assert len(calls) == 2
        with pytest.raises(torch.OutOfMemoryError):
            greedy_(kept)
        assert len(calls) == 3
    assert pager._page(kept).pins == 0


def test_an_error_leaves_everything_as_it_was():
    pager = pager_of()
    with pager.paging():
        kept = field() * 2
        send_all(pager)
        with pytest.raises(RuntimeError):
            kept @ kept
        send_all(pager)
        assert is_away(kept)
        assert torch.equal(kept, field() * 2)


def test_what_was_used_longest_ago_leaves_first():
    pager, x = pager_of(4 * 2**13), field()
    with pager.paging():
        held = [x * number for number in range(4)]
        held[0].add(1)
        extra = [x * 2, x * 3]
        assert [*map(is_away, held)] == [False, True, True, False]
        assert not any(map(is_away, extra))


def test_a_budget_of_nothing_grows_to_the_largest_operator():
    pager, x = pager_of(0), field()
    with pager.paging():
        kept = [x * number for number in range(6)]
        assert pager.budget == kept[0].nbytes
        total = kept[0] + kept[1]
        assert pager.budget == 3 * total.nbytes
        assert pager.pages.near <= pager.budget
    assert torch.equal(total, x)


def test_sparse_tensors_and_tensors_of_other_devices():
    pager = pager_of(2**13)
    with pager.paging():
        sparse = torch.eye(64).to_sparse()
        assert torch.equal(torch.sparse.mm(sparse, field().float()), field().float())
        meta = torch.empty(64, 64, device="meta") * 2
        assert meta.shape == (64, 64)


@pytest.mark.spmd(1)
def test_dtensors():
    pager = pager_of()
    with pager.paging():
        whole = distribute_tensor(field(), init_device_mesh("cpu", (1,)), [Shard(0)])
        twice = whole * 2
        send_all(pager)
        assert is_away(twice.to_local())
        assert torch.equal((twice + whole).full_tensor(), field() * 3)


def test_fake_tensors_have_no_memory():
    """By them DTensor finds the shape of what an operator gives."""
    pager = pager_of()
    with pager.paging(), FakeTensorMode() as fake:
        shape = (fake.from_tensor(field()) @ torch.empty(16, 5, dtype=torch.float64)).shape
    assert shape == (ROWS, 5)
    assert pager.pages.known == {}


def test_files_are_gone_and_used_again(tmp_path):
    memory = FileMemory(tmp_path)
    rooms = [memory.take(count) for count in (100, 120, 4096)]
    assert [*tmp_path.iterdir()] == []
    for number, room in enumerate(rooms):
        room.bytes.fill_(number)
    assert [int(room.bytes.max()) for room in rooms] == [0, 1, 2]
    assert memory.held == memory.peak == 4316
    place = rooms[0].bytes.data_ptr()
    del rooms[0], room
    again = memory.take(90)
    assert again.bytes.data_ptr() == place
    assert memory.take(128).bytes.data_ptr() != place


def test_files_take_little_more_than_what_waits(tmp_path, monkeypatch):
    """Sizes of one level of a network are followed by those of the next one."""
    monkeypatch.setattr("lightning_shard.memory.paging.file_memory.FILE_BYTES", 2**14)
    memory = FileMemory(tmp_path)
    for size in (1000, 3000, 500, 7000, 900, 20000):
        rooms = [memory.take(size) for _ in range(60000 // size)]
        for number, room in enumerate(rooms):
            room.bytes.fill_(number)
        assert [int(room.bytes.max()) for room in rooms] == [*range(len(rooms))]
        del rooms[::2]
        rooms.append(memory.take(size // 2))
        assert sum(map(len, memory._files.values())) < 1.6 * memory.peak
        del rooms, room
    assert memory.held == 0


def test_a_folder_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory; give a directory that exi"):
        FileMemory(tmp_path / "nowhere")
    memory = FileMemory(tmp_path)
    with pytest.raises(OSError, match=r"has no room for .* MiB more beside 0 MiB"):
        memory.take(2**60)
    assert [*tmp_path.iterdir()] == []


def test_the_peak_is_counted():
    memory = Memory()
    first = memory.take(10)
    del first
    second = memory.take(5)
    assert (memory.held, memory.peak) == (5, 10)
    del second


@pytest.mark.parametrize(("budget", "calls"), [(None, 45), (2**20, 55), (2**14, 100)])
def test_an_operator_costs_few_calls(budget, calls):
    """Counted are calls of functions, since a busy machine makes time longer."""
    x, found = torch.randn(64, 64), 0  # as many bytes as the least budget, which moves each result

    def chain():
        y = x
        for _ in range(25):
            y = y.add(x).mul(0.5).view(4096).view(64, 64)

    def count(_frame, event, _argument):
        nonlocal found
        found += event in ("call", "c_call")

    with pager_of(budget).paging():
        chain()  # the first time caches are filled
        sys.setprofile(count)
        try:
            chain()
        finally:
            sys.setprofile(None)
    assert found / 100 < calls
