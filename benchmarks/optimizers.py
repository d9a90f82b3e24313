"""Which optimizers update shards as they update whole parameters: the table docs/optimizers.md.

python -m benchmarks.optimizers > docs/optimizers.md
"""

import importlib
import inspect
import json
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_shard
from benchmarks.common import table
from lightning_shard.trainer.explain import explain
from lightning_shard.trainer.sharding import NEED_WHOLE_MATRICES

LIBRARIES = {
    "torch.optim": "torch", "transformers.optimization": "transformers", "timm.optim": "timm",
    "pytorch_optimizer": "pytorch-optimizer",
}  # fmt: skip
MESHES = ({"domain": 2}, {"data": 2, "domain": 2})
STEPS = 4
TOLERANCE = 1e-10  # of the largest weight
PATIENCE_S = 60.0  # until a run that hangs is ended, and so an error
EXACT, REFUSED = "exact", "refused"

INTRODUCTION = """# Optimizers on whole and on sharded parameters

Made by `python -m benchmarks.optimizers`: each optimizer trains a small network with its own
defaults, in float64, on 1x2 and on 2x2 ranks (data x domain), and in one process.

- *whole*: with `sharding="none"`, which `"auto"` takes for networks that are small beside the
  device. *shards*: with `sharding="full"`.
- *exact*: the weights are equal after four steps (1e-10 of the largest).
- *exact but for rounding*: one process with first weights that differ by 1e-15 differs as much.
- *refused*: the run ends with an error that names the optimizer and `sharding="none"`.
- *not tried*: it does not train this network alone with its defaults, for instance because it wraps
  another optimizer, or needs groups of its own.

LBFGS decides by the loss, which is the mean of all ranks.
"""


class Network(nn.Module):
    """Layers with kernels, matrices and vectors, of extents that ranks do not divide."""

    def __init__(self) -> None:
        """Draw the weights of one seed."""
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.linear = nn.Linear(3, 7)
        self.last = nn.Linear(7, 2, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, 2)."""
        return self.last(self.linear(self.norm(self.conv(x)).mean((2, 3))).tanh())


def optimizers_of(library: str) -> dict[str, Any]:
    """Return the optimizers of a library by name."""
    found = inspect.getmembers(importlib.import_module(library), inspect.isclass)
    own = library.split(".")[0]
    return {
        name: cls
        for name, cls in found
        if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
        if cls.__module__.startswith(own) and not name.startswith(("Base", "_", "LayerWise"))
    }


def train(cls: Any, mesh: Any = None, mode: Any = "full", *, rounded: float = 0.0) -> list[Tensor]:
    """Return the weights after some steps, whole.

    Args:
        cls: The class of the optimizer.
        mesh: A mesh with a domain; None: one process.
        mode: The mode of sharding.
        rounded: A relative change of the first weights, as rounding makes.

    Raises:
        Exception: It cannot update shards, as `explain` then says.
    """
    network = Network()
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(1 + rounded)
    if mesh is not None:
        options = lightning_shard.ShardingOptions(mode)
        lightning_shard.parallelize(network, mesh, options=options)
    only_matrices = cls is torch.optim.Muon
    parameters = [p for p in network.parameters() if not only_matrices or p.ndim == 2]
    torch.manual_seed(1)
    optimizer = _made(cls, parameters)
    generator = torch.Generator().manual_seed(2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (network(_of_this_rank(x, mesh)) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        x = torch.randn(4, 1, 6, 5, generator=generator, dtype=torch.float64)
        try:
            if cls is torch.optim.LBFGS:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        except Exception as error:
            explain(error, [optimizer])
            raise
    with lightning_shard.whole_parameters(network):
        return [p.detach().clone() for p in network.parameters()]


def _made(cls: Any, parameters: list[nn.Parameter]) -> Any:
    """Make an optimizer: with its defaults, with a learning rate, or with a group of matrices."""
    for options in ({}, {"lr": 0.01}):
        try:
            return cls(parameters, **options)
        except (TypeError, ValueError, RuntimeError):
            continue
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    return cls([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def _of_this_rank(x: Tensor, mesh: Any) -> Tensor:
    if mesh is None:
        return x
    if "data" in mesh.mesh_dim_names:
        x = x[mesh.get_local_rank("data") :: mesh["data"].size()]
    return lightning_shard.shard(x, mesh["domain"], 2)


def verdict(cls: Any, mesh: Any, mode: Any) -> str:
    """Compare an optimizer on the ranks of `mesh` with one process; "" where it trains nothing."""
    try:
        expected = train(cls)
    except Exception:
        return ""
    found = train(cls, mesh, mode)
    largest = max(w.abs().max() for w in expected)
    pairs = zip(found, expected, strict=True)
    difference = float(max((a - b).abs().max() for a, b in pairs) / largest)
    if difference < TOLERANCE:
        return EXACT
    if mode == "full" and cls.__name__ in NEED_WHOLE_MATRICES:
        return REFUSED  # by the strategy, which knows the optimizers
    moved = max(
        (a - b).abs().max() for a, b in zip(train(cls, rounded=1e-15), expected, strict=True)
    )
    if difference < 10 * float(moved / largest):
        return f"exact but for rounding, which it amplifies: {difference:.0e}"
    return f"WRONG: {difference:.1e}"


def _write_verdicts(names: list[list[str]], sizes: dict[str, int], mode: str, file: str) -> None:
    warnings.simplefilter("ignore")
    mesh = lightning_shard.init_mesh(sizes)
    for library, name in names:
        found = verdict(optimizers_of(library)[name], mesh, mode)
        dist.barrier()
        if dist.get_rank() == 0:
            with Path(file).open("a") as stream:
                stream.write(json.dumps([library, name, found]) + "\n")


def verdicts(
    names: list[list[str]], sizes: dict[str, int], mode: str
) -> dict[tuple[str, str], str]:
    """Return the verdict on each optimizer; an error of a rank ends all, and others follow anew."""
    found: dict[tuple[str, str], str] = {}
    ranks = int(torch.tensor(list(sizes.values())).prod())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "verdicts")
        while left := [name for name in names if tuple(name) not in found]:
            error: BaseException | None = None
            try:
                lightning_shard.launch(
                    _write_verdicts,
                    left,
                    sizes,
                    mode,
                    str(file),
                    processes=ranks,
                    timeout_s=PATIENCE_S,
                )
            except Exception as err:
                error = err
            lines = file.read_text().splitlines() if file.exists() else []
            found |= {(library, name): how for library, name, how in map(json.loads, lines)}
            if error is not None:
                library, name = next(name for name in left if tuple(name) not in found)
                is_named = f"The optimizer {name} cannot update sharded parameters" in str(error)
                found[library, name] = REFUSED if is_named else f"ERROR: {str(error)[-200:]}"
    return found


def main() -> None:
    """Print the table."""
    names = [[library, name] for library in LIBRARIES for name in optimizers_of(library)]
    columns: list[dict[tuple[str, str], str]] = []
    for mode in ("none", "full"):
        found = verdicts(names, MESHES[0], mode)
        exact = [n for n in names if found[n[0], n[1]].startswith(EXACT) and n[1] != "LBFGS"]
        columns.append(found | verdicts(exact, MESHES[1], mode))
    print(INTRODUCTION)
    packages = ("torch", *list(LIBRARIES.values())[1:])
    print(", ".join(f"{name} {version(name)}" for name in packages) + ".")
    for library in LIBRARIES:
        own = optimizers_of(library)
        rows = [[column[library, name] for column in columns] for name in own]
        whole, shards = (sum(each[i].startswith(EXACT) for each in rows) for i in range(2))
        tried = sum(bool(how) for how, _ in rows)
        print(f"\n## {library}: of {tried} exact with whole parameters {whole}, shards {shards}\n")
        table(
            ("optimizer", "whole", "shards"),
            [(n, *(how or "not tried" for how in each)) for n, each in zip(own, rows, strict=True)],
        )


if __name__ == "__main__":
    main()
