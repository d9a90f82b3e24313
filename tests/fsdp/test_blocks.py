"""Which modules are blocks: the repeated parts of known networks, and what is asked for."""

import copy
from collections import Counter

import pytest
import torch
import torchvision
import transformers
from neuralop.models import FNO, TFNO
from torch import nn

from lightning_shard import ShardingOptions, parallelize
from lightning_shard.fsdp import blocks as wrap
from lightning_shard.fsdp.blocks import blocks
from lightning_shard.processes.mesh import make_mesh


def t5():
    config = transformers.T5Config(
        d_model=128, d_ff=512, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


class Attributes(nn.Module):
    """Stages as attributes, as in many U-Nets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stage(), Stage()
        self.head = nn.Linear(300, 300)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(300, 300), nn.Linear(300, 300)

    def forward(self, x):
        return self.query(x) * self.key(x)


NETWORKS = {
    "t5": (t5, {"T5Block": 6}),
    "fno": (lambda: FNO((16, 16), 1, 1, 32, n_layers=3), {"SpectralConv": 3}),
    "tfno": (
        lambda: TFNO((32, 32), 1, 1, 32, n_layers=4, factorization="tucker", rank=0.4),
        {"SpectralConv": 4},
    ),
    # of the first stage, three bottlenecks of 70 thousand parameters go together
    "resnet": (torchvision.models.resnet50, {"Sequential": 1, "Bottleneck": 13}),
    "vit": (torchvision.models.vit_b_16, {"EncoderBlock": 12}),
    "swin": (
        torchvision.models.swin_t,
        {"SwinTransformerBlock": 12, "PatchMerging": 2},
    ),
    "transformer": (
        lambda: nn.Transformer(128, 4, 2, 2, 512, batch_first=True),
        {"TransformerEncoderLayer": 2, "TransformerDecoderLayer": 2},
    ),
    "attributes": (Attributes, {"Stage": 2}),
    "alone": (lambda: nn.Sequential(nn.Linear(400, 400)), {}),
}


@pytest.mark.slow_rows("t5")
@pytest.mark.parametrize("name", NETWORKS)
def test_repeated_parts(name):
    make, expected = NETWORKS[name]
    with torch.device("meta") if name in ("resnet", "vit", "swin") else torch.device("cpu"):
        network = make()
    assert Counter(type(m).__name__ for m in blocks(network)) == expected


def test_none_is_inside_another():
    found = blocks(NETWORKS["swin"][0]())
    inside = [m for block in found for m in block.modules() if m is not block]
    assert not set(inside) & set(found)


def test_by_size():
    """As FSDP1 counts: what inner blocks hold is not counted again."""
    network = nn.Sequential(
        nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)),
        nn.Linear(10, 10, bias=False),
    )
    assert blocks(network, min_num_params=150) == [network[0]]
    assert blocks(network, min_num_params=100) == [*network[0], network[1]]
    assert blocks(network, min_num_params=1000) == []


class Around(nn.Module):
    """A head behind a part, which may be that of another."""

    def __init__(self, part):
        super().__init__()
        self.part, self.head = part, nn.Linear(300, 2000)

    def forward(self, x):
        return self.head(self.part(x))


def test_siblings_around_one_part_are_not_blocks():
    """A hook of the part may run the layers of both, as in torchgeo's BYOL."""
    net, part = nn.Module(), nn.Sequential(Stage(), Stage())
    net.student, net.teacher = Around(part), Around(part)
    assert blocks(net) == [*part]
    net.teacher.part = copy.deepcopy(part)
    assert blocks(net) == [net.student, net.teacher]


def test_tied_parts_are_gathered_by_what_encloses_them():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    network = Tied()
    assert blocks(network, ["Linear"]) == [network.embed]  # the root takes what the head holds
    assert wrap.tied_outside(network.embed, network) == {network.embed.weight}
    outer = nn.Sequential(Tied(), nn.Linear(8, 8))
    found = blocks(outer, ["Linear", "Tied"])
    assert set(found) == {outer[0], outer[0].embed, outer[1]}
    assert not wrap.tied_outside(outer[0], outer)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", ["t5", pytest.param("swin", marks=pytest.mark.slow)])
def test_gradients_of_known_networks(name):
    """The blocks that are found run when their parameters are needed."""
    mesh = make_mesh("cpu", 2, (1,))
    torch.manual_seed(0)
    if name == "t5":
        network, x = t5().eval(), torch.arange(10).reshape(2, 5)
        run = lambda net, part: net(input_ids=part, labels=part).loss  # noqa: E731
    else:
        network = torchvision.models.swin_t().eval()
        x = torch.randn(2, 3, 64, 64)
        run = lambda net, part: net(part).square().mean()  # noqa: E731
    alone = copy.deepcopy(network)
    run(alone, x).backward()
    parallelize(network, mesh, options=ShardingOptions("full", prefetch=2))
    part = x.chunk(2)[mesh.get_local_rank("data")]
    run(network, part).backward()
    wanted = {k: p.grad for k, p in alone.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in wanted.values())
    for key, p in network.named_parameters():
        if key in wanted:
            found = p.grad.full_tensor()
            torch.testing.assert_close(found, wanted[key], rtol=1e-3, atol=1e-5 * largest, msg=key)


class Skip(nn.Module):
    """One level of a U-Net, which calls the next one."""

    def __init__(self, inner, up):
        super().__init__()
        self.inner, self.up = inner, up

    def forward(self, x):
        return self.up(self.inner(x)) + x


class HeldTwice(nn.Module):
    """A chain of levels, whose upper halves a list holds, too, as in MONAI's DynUNet."""

    def __init__(self, width=300):
        super().__init__()
        self.ups = nn.ModuleList([Up(width), Up(width)])
        self.chain = Skip(Skip(Pair(width), self.ups[0]), self.ups[1])

    def forward(self, x):
        return self.chain(x)


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        return self.two(self.one(x))


class Up(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.pair = nn.Linear(width, width), Pair(width)

    def forward(self, x):
        return self.pair(self.first(x))


def assert_inner_first(found):
    for i, block in enumerate(found):
        inside = {*block.modules()} - {block}
        assert not inside.intersection(found[i + 1 :])


@pytest.mark.spmd(2)
def test_inner_blocks_come_first_where_a_module_is_held_twice():
    torch.manual_seed(0)
    alone = HeldTwice().double()
    net, x = copy.deepcopy(alone), torch.randn(2, 300, dtype=torch.float64)
    assert_inner_first(blocks(net))
    parallelize(net, make_mesh("cpu", 2, (1,)))
    alone(x).square().mean().backward()
    net(x).square().mean().backward()
    for mine, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)


def dynunet():
    monai = pytest.importorskip("monai.networks.nets")
    widths, ones = (32, 64, 128, 256, 320, 320), [(3, 3, 3)] * 6
    strides = [(1, 1, 1), *[(2, 2, 2)] * 5]
    return monai.DynUNet(3, 1, 4, ones, strides, strides[1:], filters=widths)


@pytest.mark.quick_rows("swin_v2_b", "efficientnet_v2_l")
@pytest.mark.parametrize(
    "make",
    [
        dynunet, torchvision.models.resnet152, torchvision.models.convnext_large,
        torchvision.models.swin_v2_b, torchvision.models.vit_l_16,
        torchvision.models.efficientnet_v2_l,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_networks_at_their_real_size(make):
    """On the meta device: blocks in their order, which hold most of the parameters."""
    with torch.device("meta"):
        network = make()
    found = blocks(network)
    assert_inner_first(found)
    held = {p for block in found for p in block.parameters()}
    numbers = sum(p.numel() for p in network.parameters())
    assert sum(p.numel() for p in held) > 0.85 * numbers
