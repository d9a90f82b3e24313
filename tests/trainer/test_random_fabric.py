"""Random loops of Fabric see, save and predict on ranks what they do in one process.

Each test of a seed draws a program (random_fabric.py). It runs under Fabric's own strategy for one
process, and on all ranks; what both have noted is compared. Where it fails, the choices without
which it still fails are left out one by one, and the message names the rest.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_shard import FabricShardStrategy
from tests.trainer.random_fabric import CHOICES, Program, draw
from tests.trainer.random_fabric_loop import Loop
from tests.trainer.test_fabric import Double
from tests.trainer.test_random_trainings import MESHES, differences, programs
from tests.training import shared_path

COARSE = {"64-true": 1e-5, "32-true": 1e-3, "bf16-mixed": 0.1}  # Fabric gives results in float32


def plugins_of(program: Program, environment: Any) -> dict[str, Any]:
    if program["precision"] == "64":
        return {"plugins": [environment, Double()]}
    return {"plugins": [environment], "precision": program["precision"]}


def alone(program: Program, folder: Path) -> Loop:
    def make(**options: Any) -> Fabric:
        own = plugins_of(program, LightningEnvironment())
        fabric = Fabric(accelerator="cpu", devices=1, **own, **options)
        fabric.launch()
        return fabric

    return Loop(program, make, 1, 0, folder)


def on_ranks(program: Program, domain: tuple[int, ...], folder: Path) -> Loop:
    ranks = torch.Size(domain).numel()

    def make(**options: Any) -> Fabric:
        strategy = FabricShardStrategy(
            domain_parallel_size=domain, sharding=program["sharding"], exact_random=True
        )
        fabric = Fabric(
            accelerator="cpu", devices=dist.get_world_size(), strategy=strategy,
            **plugins_of(program, TorchElasticEnvironment()), **options,
        )  # fmt: skip
        fabric.launch()
        return fabric

    return Loop(program, make, dist.get_world_size() // ranks, dist.get_rank() // ranks, folder)


def run(begin: Callable[[], Loop], begin_again: Callable[[], Loop]) -> dict[str, Any]:
    """Run a loop, and where it is saved another that goes on; return what both have noted."""
    with ExitStack() as until_end:

        def begun(begin: Callable[[], Loop]) -> Loop:
            loop = begin()
            until_end.callback(loop.fabric.strategy.teardown)  # gives random numbers back
            return loop

        loops = [begun(begin)]
        kind = loops[0].program["resume"]
        loops[0].run()
        if kind != "none":
            loops[0].save(kind)
            loops.append(begun(begin_again))
            loops[1].load(kind)
            loops[1].run()
        events, states = [loop.events for loop in loops], [loop.state() for loop in loops]
    return {"events": events, "states": states}


def compare(program: Program, domain: tuple[int, ...], folder: Path) -> list[str]:
    """Run in both ways, and say how they differ."""
    plain = folder / f"alone_{dist.get_rank()}"
    plain.mkdir(parents=True)
    wanted = run(*[partial(alone, program, plain)] * 2)
    replicas = dist.get_world_size() // torch.Size(domain).numel()
    other = domain
    if replicas == 1 and not program["dropout"] and not program["buffer"]:
        other = (1,) if program["norm"] != "batch" else domain
    elif replicas == dist.get_world_size():
        other = (dist.get_world_size(),)
    try:
        found = run(*(partial(on_ranks, program, mesh, folder) for mesh in (domain, other)))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return differences(found, wanted, coarse=COARSE.get(program["precision"], 0.0))[:3]


def on_all_ranks(program: Program, domain: tuple[int, ...]) -> list[str]:
    """Say on all ranks alike what the first one says for which they differ."""
    each: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(each, compare(program, domain, shared_path("fabric")))
    return next((said for said in each if said), [])


def check(seed: int, domain: tuple[int, ...]) -> None:
    warnings.simplefilter("ignore")  # Lightning's advice on loaders and checkpoints
    replicas = dist.get_world_size() // torch.Size(domain).numel()
    program = draw(seed, replicas)
    said = on_all_ranks(program, domain)
    if not said:
        return
    for name, (usual, *_) in CHOICES.items():
        simpler = program | {name: usual}
        if simpler != program and (still := on_all_ranks(simpler, domain)):
            program, said = simpler, still
    least = {name: value for name, value in program.items() if value != CHOICES[name][0]}
    raise AssertionError(f"seed {seed}, {least}: {said}")


@pytest.mark.parametrize("mesh", ["1x2", "2x1"])
def test_random_loops(mesh, run_each):
    ranks, domain = MESHES[mesh]
    run_each(ranks, check, programs(domain, range(1)))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(i, i + 21) for i in range(1, 102, 21)], ids=str)
@pytest.mark.parametrize("mesh", ["1x2", "2x1", "2x2"])
def test_many_random_loops(mesh, seeds, run_each):
    ranks, domain = MESHES[mesh]
    run_each(ranks, check, programs(domain, seeds))
