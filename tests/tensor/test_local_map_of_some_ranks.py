"""`local_map` of functions whose results have a graph on some ranks only."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard import ShardingOptions, local_map, parallelize, shard
from lightning_shard.processes.mesh import make_mesh


class Net(nn.Module):
    """Two convolutions, and what happens to rows and to a weight between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.double()

    def forward(self, x, between):
        return self.second(between(self.first(x), self.scale)).square().mean()


def scaled(part, weight):
    return part * weight


def detached(part, weight):
    return part.detach() * weight.detach()


def closed(part, weight):
    """It takes a gradient of the weight only."""
    return part.detach() * weight


def on_rows(parts, functions):
    """In one process: each function on its rows."""

    def between(x, weight):
        rows = x.split(parts, 2)
        return torch.cat([f(part, weight) for f, part in zip(functions, rows, strict=True)], 2)

    return between


def field(rows):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(2, 1, rows, 5, dtype=torch.float64, generator=draw)


CASES = {
    "the first rank detaches": (5, [3, 2], [detached, scaled]),
    "the last rank detaches": (5, [3, 2], [scaled, detached]),
    "all detach": (5, [3, 2], [detached, detached]),
    "a weight of the closure on one rank": (5, [3, 2], [closed, detached]),
    "a rank without rows": (1, [1, 0], [scaled, detached]),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("case", CASES)
def test_gradients_where_some_ranks_have_a_graph(case):
    rows, parts, functions = CASES[case]
    alone, net, mesh = Net(), Net(), make_mesh("cpu", 1, (2,))
    expected = alone(field(rows), on_rows(parts, functions))
    expected.backward()
    parallelize(net, mesh, options=ShardingOptions("none"))
    own = functions[dist.get_rank()]
    between = local_map(own)
    if own is closed or functions[0] is closed:
        between = lambda x, weight: local_map(lambda part: own(part, weight))(x)  # noqa: E731
    loss = net(shard(field(rows), mesh["domain"], dims=2), between)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        if q.grad is None and functions[0] is closed:
            assert not p.grad.any(), name  # all that comes before has a graph, too
        elif q.grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.spmd(2)
def test_other_numbers_of_results_are_refused():
    x = shard(field(5), make_mesh("cpu", 1, (2,))["domain"], dims=2)
    with pytest.raises(ValueError, match=r"as many tensors on all ranks; it returned \[1, 2\]"):
        local_map(lambda part: (part,) * (1 + dist.get_rank()))(x)
