"""Meshes with axes of one's own names, and domains within nodes."""

import contextvars
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_shard
from lightning_shard import find_mesh, init_mesh, simulate
from lightning_shard.processes import mesh
from lightning_shard.processes.mesh import nearest_first, why_crossing
from tests.training import loader, make, train_alone, train_sharded, trainer

CYCLIC = ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("nodes", "sizes", "expected"),
    [
        ("aaaabbbb", (2, 4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("abababab", (2, 4), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("abababab", (4, 2), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("abab", (2, 1, 2), [[[0, 2]], [[1, 3]]]),
        ("abab", (1, 2, 2), [[[0, 2], [1, 3]]]),
        ("abba", (2, 2), [[0, 1], [2, 3]]),  # [[0, 3], [1, 2]] would not ascend
        ("aab", (1, 3), [[0, 1, 2]]),
    ],
)
def test_ranks_of_a_node_are_near(nodes, sizes, expected):
    assert nearest_first(nodes, sizes).tolist() == expected


@pytest.mark.parametrize(
    ("nodes", "groups", "reason"),
    [
        ("aabb", [[0, 1], [2, 3]], None),
        ("aabb", [[0, 1, 2, 3]], "a domain of 4 processes is on several nodes .* a node has 2"),
        ("aaabbb", [[0, 1], [2, 3], [4, 5]], "it does not divide the 3 processes of each node"),
        ("abba", [[0, 1], [2, 3]], "the launcher has numbered the ranks across nodes"),
    ],
    ids=["within", "larger", "uneven", "numbers"],
)
def test_reason_why_a_domain_is_on_several_nodes(nodes, groups, reason):
    found = why_crossing(torch.tensor(groups), nodes)
    if reason is None:
        assert found is None
    else:
        with pytest.warns(UserWarning, match=reason):
            warnings.warn(found, stacklevel=1)


def on_nodes(nodes):
    """While open, ranks are on these nodes, and meshes are made anew."""
    mesh._made.cache_clear()
    return mock.patch(
        "lightning_shard.processes.mesh.own_node", return_value=nodes[dist.get_rank()]
    )


@pytest.mark.quick_rows("full")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_training_with_ranks_numbered_across_nodes(sharding):
    expected = train_alone("simple_cnn", torch.float64, 2)
    with on_nodes(CYCLIC):
        found = train_sharded("simple_cnn", torch.float64, 2, (2,), strategy={"sharding": sharding})
        group = init_mesh({"data": 2, "domain": 2}).get_group("domain")
    mesh._made.cache_clear()
    assert dist.get_process_group_ranks(group) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    torch.testing.assert_close(found, expected)


@pytest.mark.spmd(4)
def test_one_warning_where_a_domain_is_on_several_nodes():
    with on_nodes("aabb"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_mesh({"domain": 4})
        init_mesh({"domain": 4})
    mesh._made.cache_clear()
    texts = [str(w.message) for w in caught]
    assert len(texts) == (dist.get_rank() == 0), texts
    assert all("ranks [0, 1, 2, 3] on a, b" in text for text in texts)


@pytest.mark.spmd(4)
def test_named_groups_anywhere():
    made = init_mesh({"ensemble": 2, "domain": -1})
    assert made is init_mesh({"ensemble": 2, "domain": 2}, "cpu")
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total, group=made.get_group("ensemble"))
    assert total.item() == {0: 2, 1: 4, 2: 2, 3: 4}[dist.get_rank()]
    x = torch.arange(8.0).reshape(1, 1, 8)
    split = lightning_shard.shard(x, made["domain"], dims=2)
    assert split.to_local().shape == (1, 1, 4)
    assert torch.equal(lightning_shard.gather(split), x)


@pytest.mark.spmd(4)
def test_a_group_is_found_by_its_name_alone(monkeypatch):
    """Is it there, how large is it, which rank is this, and which ranks are in it?"""
    monkeypatch.setattr(mesh, "_of_script", None)
    assert find_mesh() is None
    assert find_mesh("domain") is None
    init_mesh({"model": 4})
    made = init_mesh({"ensemble": 2, "domain": -1})
    assert find_mesh() is made
    assert find_mesh("model") is None
    assert find_mesh("domain", "model") is None
    domain, rank = find_mesh("domain"), dist.get_rank()
    assert (domain.size(), domain.get_local_rank()) == (2, rank % 2)
    assert dist.get_process_group_ranks(domain.get_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert find_mesh("ensemble", "domain").shape == (2, 2)


@pytest.mark.quick_rows("full")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("sharding", ["full", "hybrid"])
def test_code_of_a_library_finds_the_groups_of_a_trainer(sharding, monkeypatch):
    monkeypatch.setattr(mesh, "_of_script", None)
    found = []

    class Asks(torch.nn.Module):
        def forward(self, x):
            init_mesh({"model": 4})  # of a script: what is found stays the Trainer's
            found.append([find_mesh(name).size() for name in ("data", "domain")])
            return x

    strategy = {"sharding": sharding} | ({"shard_size": 2} if sharding == "hybrid" else {})
    module = make("simple_cnn", torch.float32)
    module.network.relu = torch.nn.Sequential(Asks(), torch.nn.ReLU())
    runner = trainer((2,), strategy=strategy, limit_train_batches=1)
    runner.fit(module, loader("simple_cnn", torch.float32, 2, 4))
    assert found == [[2, 2]]
    assert find_mesh("model").size() == 4, "after it the script's"


def test_simulated_ranks_find_their_own():
    def body():
        assert find_mesh() is None
        init_mesh({"domain": 3})
        return find_mesh("domain").get_local_rank()

    assert simulate(body, processes=3) == [0, 1, 2]
    assert find_mesh() is None


@pytest.mark.spmd(4)
@pytest.mark.parametrize("sizes", [{"a": 3, "b": -1}, {"a": 2}, {"a": -1, "b": -1}, {}], ids=str)
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(ValueError, match="must multiply to the number of processes, 4"):
        init_mesh(sizes)


@pytest.mark.spmd(2)
def test_sizes_without_names():
    with pytest.raises(TypeError, match=r"as in init_mesh\(\{'data': -1, 'domain': 2\}\); got 1\."):
        init_mesh(1, 2)
    assert init_mesh({"data": -1, "domain": 2}).shape == (1, 2)


def test_mesh_before_the_start():
    with pytest.raises(RuntimeError, match=r"there is no process group .* start_process_group"):
        init_mesh({"domain": 1})


@pytest.mark.spmd(2)
def test_runs_leave_nothing_in_the_context_of_the_process():
    """torch 2.15 keeps a ContextVar each time that `mesh[name]` is asked for."""
    kept = []
    for _ in range(3):
        train_sharded("simple_cnn", torch.float32, 2, (2,))
        kept.append(len(contextvars.copy_context()))
    assert kept[0] == kept[1] == kept[2]
