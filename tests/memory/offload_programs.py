"""Networks and programs for `test_offload_streams.py`: everything that meets offloaded blocks."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Exp(nn.Module):
    """Autograd saves its result, which nobody else keeps."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Mlp(nn.Module):
    """Its activation is saved twice, and its input by two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Heads(nn.Module):
    """Parts of one tensor, a transposed one and an expanded one are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Linear(WIDTH, 3 * WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x).chunk(3, dim=-1)
        weights = (q @ k.t()).softmax(-1)
        mean = v.mean(0, keepdim=True).expand(v.shape)
        return self.frozen(weights @ v) * mean + x


class Norm(nn.Module):
    """Small statistics are saved beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x))


class Complex(nn.Module):
    """A conjugated view is saved."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(-1, WIDTH // 2, 2))
        return torch.view_as_real(z * (z * z).conj()).reshape(x.shape).tanh()


class Branches(nn.Module):
    """Returns what the loss leaves out, and computes something without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Mlp(), Exp()
        self.unused: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.unused = self.b(self.a(x).tanh())
        with torch.no_grad():
            scale = self.a(x).abs().mean()
        return self.a(x * scale).sigmoid()


class Checkpointed(nn.Module):
    """A block whose inner part is computed again, with another block in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.tanh(), use_reentrant=False).sin()


class Normed(nn.Module):
    """Batch norm and an activation in place, as in residual networks; it averages statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(F.relu(self.norm(self.first(x)), inplace=True))
        y += x
        return self.last(F.silu(y, inplace=True))


class Joined(nn.Module):
    """Views and other dtypes of what an activation made are joined, as in U-Nets."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.up(x))
        left, right = wide.float().double().chunk(2, -1)
        narrow = torch.cat([right, F.softplus(x - left)], -1)[:, 1:-1] * 2
        return self.down(torch.cat([narrow, wide[:, ::3], x[:, :4]], -1)) * x.sigmoid()


class Rewritten(nn.Module):
    """A tensor that no operator has saved yet is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 2
        y[:, 1:3] += 1
        z = (x - 1).clamp(-0.5, 0.5)
        z.neg_().add_(y, alpha=0.5)
        return self.last(z) + self.last(y.mul_(0.5))


KINDS: list[Callable[[], nn.Module]] = [
    Exp, Mlp, Heads, Norm, Complex, Branches, Checkpointed, Normed, Joined, Rewritten,
]  # fmt: skip


class Net(nn.Module):
    """Blocks of the kinds given, between tanhs that keep values small."""

    def __init__(self, kinds: list[Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.tanh())
        return x


class Chain(nn.Module):
    """Blocks whose every tensor is saved once and kept by nobody else."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, WIDTH), -1.0, dtype=torch.float64))
        self.blocks = nn.Sequential(*(Exp() for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x * self.weight - 3)


def network(kinds: list[Callable[[], nn.Module]]) -> Net:
    """With the same weights each time."""
    torch.manual_seed(0)
    return Net(kinds).double()


_SAMPLES = torch.rand(
    8, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
).unbind()  # no program draws numbers, which would be others each time that its kernels run


def sample(number: int = 0) -> Tensor:
    """(3, WIDTH), a leaf."""
    return _SAMPLES[number].clone()


def gradients(net: nn.Module) -> list[Tensor]:
    """Of the parameters that have some."""
    return [p.grad for p in net.parameters() if p.grad is not None]


def train(net: nn.Module, steps: int = 2) -> list[Tensor]:
    """Some steps of gradient descent: losses, gradients, parameters."""
    losses = []
    for number in range(steps):
        loss = net(sample(number)).square().sum()
        net.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    return [*losses, *gradients(net), *(p.detach() for p in net.parameters())]


def accumulate(net: nn.Module) -> list[Tensor]:
    """Several forwards before any backward, the first one first, as pipelines do."""
    losses = [net(sample(number)).sum() for number in range(3)]
    losses[0].backward()
    losses.append(net(sample(3)).sum())
    for loss in losses[1:]:
        loss.backward()
    return gradients(net)


def sum_of_forwards(net: nn.Module) -> list[Tensor]:
    """One backward through three forwards."""
    torch.stack([net(sample(number)).square().mean() for number in range(3)]).sum().backward()
    return gradients(net)


def twice(net: nn.Module) -> list[Tensor]:
    """A graph that is kept for a second backward."""
    loss = net(sample()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(net)


def second_order(net: nn.Module) -> list[Tensor]:
    """The gradient of a gradient."""
    x = sample().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    return [grad.detach(), *gradients(net)]


def in_parts(net: nn.Module) -> list[Tensor]:
    """Gradients of some parameters only, then of all."""
    loss = net(sample()).square().sum()
    some = [p for p in net.parameters() if p.requires_grad][-2:]
    found = torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
    loss.backward()
    return [*(f for f in found if f is not None), *gradients(net)]


def dropped(net: nn.Module) -> list[Tensor]:
    """Graphs without backward, one with half of one, and a forward without gradients."""

    def stop(grad: Tensor) -> None:
        raise InterruptedError

    net(sample(1))
    kept = net(sample(2))
    with torch.no_grad():
        evaluated = net(sample(3))
    middle = net(sample(4).requires_grad_())
    middle.sum().register_hook(stop)
    first = net(x := sample(5).requires_grad_())
    x.register_hook(stop)
    try:
        first.sum().backward()
    except InterruptedError:
        net.zero_grad()
    del kept, middle, first
    loss = net(sample()).square().sum()
    loss.backward()
    return [evaluated, *gradients(net)]


PROGRAMS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    f.__name__: f
    for f in (train, accumulate, sum_of_forwards, twice, second_order, in_parts, dropped)
}


def random_kinds(seed: int) -> list[Callable[[], nn.Module]]:
    """Some blocks, one of which has parameters."""
    choose = random.Random(seed)
    return [Mlp, *choose.choices(KINDS, k=choose.randint(1, 4))]


def random_program(seed: int, net: nn.Module) -> list[Tensor]:
    """Forwards and backwards in any order; the same with the same seed."""
    choose = random.Random(seed)
    graphs: list[Tensor] = []
    found: list[Tensor] = []
    for number in range(8):
        action = choose.choice(["forward", "forward", "backward", "again", "drop", "evaluate"])
        if action == "forward" or not graphs:
            graphs.append(net(sample(number)).square().sum())
        elif action == "evaluate":
            with torch.no_grad():
                found.append(net(sample(number)))
        else:
            loss = graphs.pop(choose.randrange(len(graphs)))
            if action != "drop":
                found.append(loss.detach())
                loss.backward(retain_graph=action == "again")
            graphs += [loss] if action == "again" else []
            del loss
    return [*found, *gradients(net)]
