"""What a module sends by itself counts each domain once."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.distributed import all_reduce as bound_before
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard import HybridShardStrategy
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.processes.mesh import make_mesh
from lightning_shard.processes.replica_world import replica_world
from tests.parity import assert_same


@pytest.mark.spmd(4)
def test_collectives_go_over_replicas():
    mesh = make_mesh("cpu", 2, [2])
    replica = mesh["data"].get_local_rank()
    with replica_world(mesh):
        assert (dist.get_world_size(), dist.get_rank()) == (2, replica)
        for all_reduce in (dist.all_reduce, bound_before):
            total = torch.tensor([replica + 1.0])
            all_reduce(total)
            assert total == 3
        highest = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        assert highest == 1
        found = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(found, torch.tensor([10.0 + replica]))
        assert torch.cat(found).tolist() == [10, 11]
        for source in (0, 1):
            sent, objects = torch.tensor([float(replica)]), [replica]
            dist.broadcast(sent, src=source)
            dist.broadcast_object_list(objects, src=source)
            assert sent == objects[0] == source
        summed = torch.tensor([replica + 1.0])
        dist.reduce(summed, dst=1)
        assert summed == 3 or dist.get_rank() == 0
        names = [None, None]
        dist.all_gather_object(names, f"replica {dist.get_rank()}")
        assert names == ["replica 0", "replica 1"]
        dist.barrier()
    assert dist.get_world_size() == 4


@pytest.mark.spmd(4)
def test_all_processes_have_what_the_first_broadcasts():
    """It may have drawn that alone; ranks of a domain must go on with the same numbers."""
    mesh, drawn = make_mesh("cpu", 2, [2]), 10.0 + dist.get_rank()
    with replica_world(mesh):
        for options in ({"src": 0}, {"group_src": 0}, {"src": 0, "group": dist.group.WORLD}):
            sent, objects = torch.tensor([drawn]), [drawn]
            dist.broadcast(sent, **options)
            dist.broadcast_object_list(objects, **options)
            assert sent == objects[0] == 10
        dist.broadcast(sent := torch.tensor([drawn]), 0)
        dist.broadcast_object_list(objects := [drawn])
        assert sent == objects[0] == 10
        dist.barrier(dist.group.WORLD)
        x = torch.ones(1, requires_grad=True)
        torch.distributed.nn.functional.broadcast(x, 0).backward()
        assert x.grad == (2 if dist.get_rank() == 0 else 0)  # one of each replica


@pytest.mark.spmd(4)
def test_groups_that_are_named_keep_their_meaning():
    mesh = make_mesh("cpu", 2, [2])
    with replica_world(mesh):
        for axis in ("data", "domain"):
            group, place = mesh[axis].get_group(), mesh[axis].get_local_rank()
            assert (dist.get_world_size(group), dist.get_rank(group)) == (2, place)
            total = torch.tensor([place + 1.0])
            dist.all_reduce(total, group=group)
            assert total == 3
        for collective in (dist.all_reduce, torch.distributed.nn.functional.all_reduce):
            with pytest.raises(RuntimeError, match=r"all_reduce over .*WORLD"):
                collective(torch.ones(1), group=dist.group.WORLD)
        functional = torch.distributed._functional_collectives
        with pytest.raises(RuntimeError, match=r"all_reduce over .*WORLD"):
            functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
        assert functional.all_reduce(torch.ones(1), "sum", mesh["domain"].get_group()) == 2


@pytest.mark.spmd(2)
def test_all_processes_by_name_where_they_are_one_domain():
    """The domain's group must be another object than group.WORLD, or one could not tell them."""
    for mesh in (make_mesh("cpu", 1, [2]), lightning_shard.init_mesh({"domain": 2})):
        domain = mesh["domain"].get_group()
        with replica_world(mesh):
            with pytest.raises(RuntimeError, match=r"all_reduce over .*WORLD"):
                dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
            assert (dist.get_world_size(), dist.get_world_size(domain)) == (1, 2)
            total, alone = torch.ones(1), torch.ones(1)
            dist.all_reduce(total, group=domain)
            dist.all_reduce(alone)
            assert (total, alone) == (2, 1)


@pytest.mark.spmd(4)
def test_the_numbers_of_all_processes_by_name_are_those_of_replicas():
    """Libraries that share files out, such as webdataset, ask with the group of all processes."""
    mesh = make_mesh("cpu", 2, [2])
    with replica_world(mesh):
        place = dist.get_rank(dist.group.WORLD), dist.get_world_size(group=dist.group.WORLD)
        assert place == (mesh["data"].get_local_rank(), 2)
    assert dist.get_world_size(dist.group.WORLD) == 4


@pytest.mark.spmd(2)
def test_a_mesh_of_torch_lends_all_processes_to_its_domain():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "domain"))
    refusal = r"all_reduce over .*WORLD.*lightning_shard.init_mesh"
    group = mesh["domain"].get_group()
    with replica_world(mesh):
        with pytest.raises(RuntimeError, match=refusal):
            dist.all_reduce(torch.ones(1), group=group)
        for number in (dist.get_rank, dist.get_world_size):
            with pytest.raises(RuntimeError, match=refusal.replace("all_reduce", number.__name__)):
                number(group)


@pytest.mark.spmd(4)
def test_gradient_of_a_differentiable_collective():
    mesh = make_mesh("cpu", 2, [2])
    replica = mesh["data"].get_local_rank()
    x = torch.tensor([replica + 1.0], requires_grad=True)
    with replica_world(mesh):
        total = torch.distributed.nn.functional.all_reduce(x)
        (total * (replica + 1)).backward()
    assert (total, x.grad) == (3, 3)


@pytest.mark.spmd(2)
def test_a_domain_alone_is_a_world_of_one():
    mesh = make_mesh("cpu", 1, [2])
    with replica_world(mesh):
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 1
    with pytest.raises(ZeroDivisionError), replica_world(mesh):
        _ = 1 / 0
    assert dist.get_world_size() == 2


class Codebook(nn.Module):
    """An exponential moving average of what falls to each code, over all processes.

    As in van den Oord et al. 2017 (arXiv 1711.00937, appendix A.1) and its implementations.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(7, 3, dtype=torch.float64))
        self.register_buffer("size", torch.ones(7, dtype=torch.float64))
        self.register_buffer("total", self.codes.clone())
        self.all_reduce = dist.all_reduce  # bound before any step, as libraries do

    def forward(self, x):
        distance = (x.unsqueeze(-2) - self.codes).square().sum(-1)
        chosen = F.one_hot(distance.argmin(-1), 7).to(x.dtype)
        if self.training:
            size = chosen.sum((0, 1, 2))
            total = torch.einsum("bhwk,bhwc->kc", chosen, x.detach())
            self.all_reduce(size)
            self.all_reduce(total)
            self.size.lerp_(size, 0.2)
            self.total.lerp_(total, 0.2)
            self.codes.copy_(self.total / self.size.unsqueeze(-1))
        return x + (chosen @ self.codes - x).detach()


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(2, 3, 3, padding=1).double()
        self.codebook = Codebook()

    def training_step(self, batch, _):
        return self.codebook(self.embed(batch).permute(0, 2, 3, 1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=pytest.mark.spmd(2)), pytest.param(4, marks=pytest.mark.spmd(4))],
)
def test_codebook_equals_one_process(ranks):
    torch.manual_seed(1)
    module, data = Net(), torch.randn(8, 2, 9, 5, dtype=torch.float64)
    alone = Net()
    alone.load_state_dict(module.state_dict())
    alone.codebook.all_reduce = lambda tensor: None
    optimizer = alone.configure_optimizers()
    for step in range(2):
        alone.training_step(data[4 * step : 4 * step + 4], step).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = data.view(2, 4, 2, 9, 5).chunk(ranks // 2, 1)[dist.get_rank() // 2]  # of this replica
    Trainer(
        accelerator="cpu",
        devices=ranks,
        use_distributed_sampler=False,
        strategy=HybridShardStrategy(domain_parallel_size=2),
        plugins=TorchElasticEnvironment(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(list(own), batch_size=None))
    state = full_module_state(module)
    for name, value in alone.state_dict().items():
        assert_same(state[name], value, name)


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "sizes", [{"data": 2, "domain": 2}, {"data": 1, "domain": 4}, {"domain": 4}]
)
def test_without_lightning(sizes):
    torch.manual_seed(1)
    mesh, data = lightning_shard.init_mesh(sizes), torch.randn(4, 6, 5, 3, dtype=torch.float64)
    codebook, alone = Codebook(), Codebook()
    alone.load_state_dict(codebook.state_dict())
    alone.all_reduce = lambda tensor: None
    alone(data)
    lightning_shard.parallelize(codebook, mesh)
    replicas = sizes.get("data", 1)
    own = data.chunk(replicas)[dist.get_rank() * replicas // 4]
    codebook(lightning_shard.shard(own, mesh["domain"], 1))
    for name, value in alone.state_dict().items():
        assert_same(codebook.state_dict()[name], value, name)
