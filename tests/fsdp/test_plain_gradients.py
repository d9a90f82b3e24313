"""Gradients of whole parameters are the mean over all ranks, however backward runs."""

import contextlib
import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import lightning_shard
from lightning_shard import ShardingOptions, parallelize
from lightning_shard.fsdp import plain_gradients
from lightning_shard.fsdp.plain_gradients import leave_plain_gradients, plain_gradients_of
from lightning_shard.processes.mesh import make_mesh
from tests.pairs import choose
from tests.parity import mesh_of
from tests.trainer.featured import Featured, assert_same_state, fit_alone, fit_sharded


class Net(nn.Module):
    """Real, complex and scalar parameters, a tied weight, and two heads, of which one is used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.phase = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(()))
        self.heads = nn.ModuleList(nn.Conv2d(4, 3, 1) for _ in range(2))
        self.tied = self.heads[0]
        self.idle = nn.Linear(2, 2)
        self.double()
        self.phase.data = self.phase.data.to(torch.complex128)

    def forward(self, x, head=0):
        y = self.stem(x) * self.scale
        return self.heads[head]((y * self.phase).real + y.tanh())


def samples(count=4):
    return torch.randn(count, 2, 9, 5, dtype=torch.float64, generator=generator())


def generator():
    return torch.Generator().manual_seed(3)


def whole(net, mesh):
    parallelize(net, mesh, options=ShardingOptions("none"))
    return net


def of_rank(x, mesh):
    """The samples of this replica, split over the ranks of its domain."""
    mine = x.chunk(mesh["data"].size())[mesh.get_local_rank("data")]
    domain = mesh["domain"]
    return lightning_shard.shard(mine, domain, dims=2) if domain.size() > 1 else mine


def assert_gradients(net, expected):
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert type(p) is nn.Parameter
        if q.grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-13, msg=name)


MESHES = pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (2, 2)], ids=str)


def both(sizes):
    mesh, alone = make_mesh("cpu", sizes[0], (sizes[1],)), Net()
    return alone, whole(Net(), mesh), mesh


@pytest.mark.quick_rows("1-(1, 4)", "200-(2, 2)", "26214400-(4, 1)")
@pytest.mark.spmd(4)
@MESHES
@pytest.mark.parametrize("bucket", [1, 200, 25 * 2**20])
def test_a_mean_for_any_size_of_bucket(sizes, bucket, monkeypatch):
    monkeypatch.setattr(plain_gradients, "BUCKET_BYTES", bucket)
    alone, net, mesh = both(sizes)
    x = samples()
    for _ in range(2):  # the second pass adds to what the first has averaged
        alone(x).square().mean().backward()
        net(of_rank(x, mesh)).square().mean().backward()
        assert_gradients(net, alone)


@pytest.mark.spmd(4)
@MESHES
def test_accumulation_sends_nothing_in_between(sizes):
    alone, net, mesh = both(sizes)
    x = samples(8)
    for i, part in enumerate(x.chunk(2)):
        alone(part, i).square().mean().backward()
        with lightning_shard.no_sync(net) if i == 0 else contextlib.nullcontext():
            net(of_rank(part, mesh), i).square().mean().backward()
    assert_gradients(net, alone)


@pytest.mark.spmd(2)
def test_replicas_that_use_different_heads():
    """As DDP with find_unused_parameters: the other replica has a gradient of zeros."""
    mesh, alone = make_mesh("cpu", 2, (1,)), Net()
    net, x, rank = whole(Net(), mesh), samples(2), dist.get_rank()
    (sum(alone(x[i : i + 1], i).square().mean() for i in range(2)) / 2).backward()
    net(x[rank : rank + 1], rank).square().mean().backward()
    assert_gradients(net, alone)


@pytest.mark.spmd(2)
def test_a_reentrant_checkpoint_that_uses_a_parameter_twice(monkeypatch):
    """Its gradient grows again after the bucket has left."""
    monkeypatch.setattr(plain_gradients, "BUCKET_BYTES", 1)
    mesh, alone = make_mesh("cpu", 2, (1,)), Net()
    net, x = whole(Net(), mesh), samples(2).requires_grad_()

    def loss(net, x):
        y = net.stem(x)
        for _ in range(2):
            y = checkpoint(
                lambda y: (y + net.heads[0](y).mean(1, True)).tanh(), y, use_reentrant=True
            )
        return y.square().mean()

    loss(alone, x).backward()
    loss(net, of_rank(x, mesh)).backward()
    assert_gradients(net, alone)


@pytest.mark.spmd(4)
@MESHES
def test_gradients_of_gradients(sizes):
    alone, net, mesh = both(sizes)
    x = samples()
    for each, given in ((alone, x), (net, of_rank(x, mesh))):
        each(given).square().mean().backward(create_graph=True)
        used = [p for p in each.parameters() if p.grad is not None]
        penalty = sum(p.grad.abs().square().sum() for p in used)
        first = [p.grad.detach().clone() for p in used]
        for p in used:
            p.grad = None
        penalty.backward()
        each.first = first
    for mine, wanted in zip(net.first, alone.first, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-13)
    assert_gradients(net, alone)


def clamped(gradient):
    return gradient.clamp(-1e-3, 1e-3)  # not linear, so a mean of clamped parts is another


@pytest.mark.spmd(4)
@MESHES
@pytest.mark.parametrize("early", [True, False])
def test_hooks_of_parameters_are_given_the_mean(sizes, early):
    """Registered before the module is prepared, or after."""
    mesh, alone, net = make_mesh("cpu", sizes[0], (sizes[1],)), Net(), Net()
    x, seen = samples(), {}

    def register(each):
        each.stem.weight.register_hook(clamped)
        each.heads[0].weight.register_post_accumulate_grad_hook(
            lambda p: seen.setdefault(each, []).append(p.grad.norm().item())
        )

    register(alone)
    if early:
        register(net)
    whole(net, mesh)
    if not early:
        register(net)
    for _ in range(2):
        alone(x).square().mean().backward()
        with lightning_shard.no_sync(net):
            net(of_rank(x, mesh)).square().mean().backward()
    net(of_rank(x, mesh)).square().mean().mul(0).backward()  # sends what has been added up
    assert seen[net][:2] == pytest.approx(seen[alone], rel=1e-10)
    torch.testing.assert_close(net.stem.weight.grad, alone.stem.weight.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.spmd(2)
def test_a_hook_of_one_rank_alone_is_refused_with_a_way_out():
    """Loggers that draw gradients, as wandb's `watch` does, register theirs on the first rank."""
    net = Net()
    whole(net, make_mesh("cpu", 1, (2,)))
    for p in [*net.parameters()] if dist.get_rank() == 0 else []:
        p.register_hook(lambda gradient: None)
    with pytest.raises(lightning_shard.DisagreementError, match="in on_before_optimizer_step"):
        net(samples()).square().mean().backward()


@pytest.mark.spmd(2)
def test_an_optimizer_in_backward():
    """It steps in the hook of each parameter, and frees the gradient."""
    mesh, alone = make_mesh("cpu", 1, (2,)), Net()
    net, x = whole(Net(), mesh), samples()
    for each, given in ((alone, x), (net, of_rank(x, mesh))):
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in each.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in each.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            each(given).square().mean().backward()
    assert all(p.grad is None for p in net.parameters())
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)


class Words(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(11, 3, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, words):
        return self.head(self.table(words))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("hooked", [False, True])
def test_the_sum_of_half_gradients_need_not_fit(hooked):
    net = nn.Linear(1, 1, bias=False).half()
    seen = []
    whole(net, make_mesh("cpu", 1, (4,)))
    if hooked:
        net.weight.register_hook(seen.append)
    (net.weight * 30_000).sum().backward()
    assert net.weight.grad.item() == 30_000
    assert all(gradient.item() == 30_000 for gradient in seen)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("also_dense", [False, True])
def test_sparse_gradients(also_dense):
    alone, net = Words(sparse=True), Words(sparse=True)
    whole(net, make_mesh("cpu", 3, (1,)))
    words = [torch.tensor(w) for w in ([1, 1, 4], [4, 7], [0])]

    def loss(net, w):
        return net(w).square().mean() + (net.table.weight.square().sum() if also_dense else 0)

    (sum(loss(alone, w) for w in words) / 3).backward()
    loss(net, words[dist.get_rank()]).backward()
    assert net.table.weight.grad.is_sparse is not also_dense
    torch.testing.assert_close(
        net.table.weight.grad.to_dense(), alone.table.weight.grad.to_dense(), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(net.head.weight.grad, alone.head.weight.grad)


@pytest.mark.spmd(3)
def test_sparse_gradients_among_shards():
    alone, net = Words(sparse=True), Words(sparse=True)
    parallelize(net, make_mesh("cpu", 3, (1,)), options=ShardingOptions("full"))
    words = [torch.tensor(w) for w in ([1, 1, 4], [4, 7], [0])]
    (sum(alone(w).square().mean() for w in words) / 3).backward()
    net(words[dist.get_rank()]).square().mean().backward()
    found, expected = net.table.weight.grad, alone.table.weight.grad
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-12, atol=0)
    torch.testing.assert_close(net.head.weight.grad.full_tensor(), alone.head.weight.grad)


@pytest.mark.spmd(2)
def test_a_rank_that_trains_other_parameters_is_named():
    net, rank = whole(Net(), make_mesh("cpu", 2, (1,))), dist.get_rank()
    net.stem.requires_grad_(rank == 0)
    with pytest.raises(
        lightning_shard.DisagreementError, match=r"averages the gradients of (6|8) parameters"
    ):
        net(samples(1)).square().mean().backward()


@pytest.mark.spmd(2)
def test_a_replica_whose_loss_reaches_nothing_counts_as_zeros():
    alone, net, mesh = both((2, 1))
    x = samples(2)
    for step in range(4):
        reach = range(2 if step == 0 else 1)
        alone.zero_grad()
        net.zero_grad()
        (sum(alone(x[i : i + 1]).square().mean() for i in reach) / 2).backward()
        loss = net(of_rank(x, mesh)).square().mean()
        with plain_gradients_of(net).one_backward():
            if dist.get_rank() in reach:
                loss.backward()
        assert_gradients(net, alone)


@pytest.mark.spmd(2)
def test_a_rank_whose_loss_reaches_nothing_says_so_where_it_waits_in_vain():
    net = whole(Net(), make_mesh("cpu", 2, (1,)))
    if dist.get_rank() == 0:
        return  # as if it waited in an exchange of its backward pass
    plain = plain_gradients_of(net)
    store = plain._order._store
    usual = store.timeout
    store.set_timeout(timedelta(seconds=2))
    try:
        said = "its loss reaches no parameter, and for 1 s not"
        with pytest.raises(TimeoutError, match=said), plain.one_backward():
            """Nothing that makes a gradient."""
    finally:
        store.set_timeout(usual)


@pytest.mark.spmd(2)
def test_an_error_in_backward_leaves_nothing_behind():
    mesh, alone = make_mesh("cpu", 2, (1,)), Net()
    net, x = whole(Net(), mesh), samples(2)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("in backward")

    with pytest.raises(ValueError, match="in backward"):
        net.heads[0](Fails.apply(net.stem(of_rank(x, mesh)))).sum().backward()
    net.zero_grad()
    alone(x).square().mean().backward()
    net(of_rank(x, mesh)).square().mean().backward()
    assert_gradients(net, alone)


@pytest.mark.spmd(2)
def test_the_module_stays_an_ordinary_one():
    mesh = mesh_of(2)
    net = whole(Net(), mesh)
    copied = copy.deepcopy(net)
    average = AveragedModel(net)
    average.update_parameters(net)
    assert plain_gradients_of(copied) is None
    copied(samples(1)).sum().backward()  # alone, and so without a message
    leave_plain_gradients(net)
    if dist.get_rank() == 0:
        net(samples(1)).sum().backward()
    assert type(net) is Net


def test_lazy_modules_are_refused():
    with pytest.raises(ValueError, match="no shape yet"):
        lightning_shard.simulate(lazy, processes=2)


def lazy():
    whole(nn.Sequential(nn.LazyLinear(3)), lightning_shard.init_mesh({"data": 2}))


class Assigns(Featured):
    """Puts gradients of its own samples into `.grad`, by torch.autograd.grad."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, parameters = self.optimizers(), list(self.parameters())
        found = torch.autograd.grad(self.loss(batch), parameters)
        for p, gradient in zip(parameters, found, strict=True):
            p.grad = gradient
        optimizer.step()


class Unfreezes(Featured):
    """Trains its first layer from the second step on, in manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.network[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.network[0].requires_grad_(True)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Grows(Featured):
    """A hook puts a layer in the place of another, and gives it to the optimizer."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            torch.manual_seed(batch_idx + self.global_rank)  # the first rank's values count
            self.network[3] = nn.Conv2d(4, 1, 3, padding=1, dtype=torch.float64)
            optimizer = self.optimizers()
            optimizer.add_param_group({"params": list(self.network[3].parameters())})


class Rows(Featured):
    """Writes into rows of parameters and of gradients in hooks, as for a padding row."""

    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.network[0].weight[0].mul_(0.5)

    def on_after_backward(self):
        self.network[3].weight.grad[0] = 0


@pytest.mark.spmd(2)
@pytest.mark.parametrize(("kind", "domain"), choose([Assigns, Unfreezes, Rows], [(1,), (2,)]))
def test_what_programs_do_to_parameters(kind, domain):
    alone, net = kind(), kind()
    fit_alone(alone)
    fit_sharded(net, domain)
    assert_same_state(net, alone)


@pytest.mark.spmd(2)
def test_shards_that_are_switched_on_in_a_step():
    """The step is refused; a hook before it, which the sentence names, may do so."""

    class InHook(Unfreezes):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.network[0].requires_grad_(True)

    with pytest.raises(RuntimeError, match=r"switched on requires_grad .*sharding='none'"):
        fit_sharded(Unfreezes(), (2,), strategy={"sharding": "full"})
    alone, net = InHook(), InHook()
    fit_alone(alone)
    fit_sharded(net, (2,), strategy={"sharding": "full"})
    assert_same_state(net, alone)


@pytest.mark.spmd(2)
def test_a_layer_that_a_hook_has_made_is_the_same_on_all_ranks():
    net = Grows()
    fit_sharded(net, (1,))
    found = [torch.empty_like(net.network[3].weight) for _ in range(2)]
    dist.all_gather(found, net.network[3].weight.detach())
    assert torch.equal(*found)
