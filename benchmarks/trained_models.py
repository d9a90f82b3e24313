"""Unmodified models of other people, trained under HybridShardStrategy, beside one process.

    python -m benchmarks.trained_models

One model of each library of benchmarks/model_zoo, in float64. Each takes five steps of AdamW in
Lightning's Trainer: alone in one process, and split over several. The table gives the largest
relative error of the five losses, and the largest error of how far the steps moved weights and
buffers. With two replicas, one process accumulates the gradients of both samples, and begins both
with the same buffers, as replicas do: a spectral norm computes with them. The buffers afterwards
differ from the replicas', as under DDP, and are not compared.

`--library timm smp` are some libraries; one that is not installed is named and left out. `--mesh 2
2x2` are some meshes.
"""

import argparse
import contextlib
import faulthandler
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_shard
from benchmarks.common import QUIET, describe, table
from benchmarks.model_zoo import Case, cases
from benchmarks.model_zoo.comparison import made, relative_errors, tensors_of
from lightning_shard.checkpoint.state import full_module_state

STEPS = 5
WAIT_S = 300
MODELS = {  # one of each library
    "torchvision": "resnet18",
    "neuralop": "tfno_tucker",
    "transformers": "bert_embeds",
    "timm": "test_convnext",
    "monai": "unet_2d",
    "smp": "unet",
    "diffusers": "unet_2d",
    "torch_geometric": "mesh_graph_net",
    "aurora": "pretrained",
    "physicsnemo": "dit",
    "torch_harmonics": "sfno",
    "anemoi": "transformer_processor",
    "credit": "wxformer",
    "the_well": "unet_convnext",
    "nnunet": "residual_encoder_unet",
    "segment_anything": "image_encoder",
    "spandrel": "swinir",
    "x_transformers": "vision",
}
# data replicas, and the ranks of the domain along each of its axes
MESHES = {"2": (1, (2,)), "3": (1, (3,)), "2x2": (1, (2, 2)), "2 replicas x 2": (2, (2,))}


class Trained(LightningModule):
    """A model of the gallery that learns fixed random numbers from random inputs.

    Args:
        case: The model.
        replicas: Batches of one step, which this process takes one after the other.

    Attributes:
        losses: Of each step.
        split: Whether the last batch was.
    """

    split = False

    def __init__(self, case: Case, replicas: int = 1) -> None:
        super().__init__()
        self.network, self.replicas = made(case), replicas
        self.before: list[Tensor] = []  # the buffers, when a step began
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        torch.manual_seed(6)
        if batch_idx % self.replicas == 0:
            self.before = [x.clone() for x in self.buffers()]
        for buffer, value in zip(self.buffers(), self.before, strict=True):
            buffer.copy_(value)
        self.split = any(isinstance(x, lightning_shard.DomainTensor) for x in batch.values())
        loss = distance(self.network(*batch.values()))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self.parameters())


def adam(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, which moves no weight whose gradient is zero but for rounding."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6)


def distance(outputs: Any) -> Tensor:
    """The squared distance of the outputs from random numbers, summed over outputs."""
    generator = torch.Generator().manual_seed(9)
    losses = []
    for x in tensors_of(outputs):
        if x.requires_grad and x.is_floating_point():
            target = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            losses.append((x - target.to(x.dtype)).square().mean().double())
    return torch.stack(losses).sum()


def batches(case: Case, number: int) -> DataLoader:
    """Batches of one sample each, the same on every rank."""
    samples = []
    for index in range(number):
        torch.manual_seed(index)
        samples.append({str(place): x for place, x in enumerate(case.tensors())})
    return DataLoader(samples, 1, collate_fn=lambda items: items[0])  # pyright: ignore[reportArgumentType]


def fitted(case: Case, number: int, replicas: int = 1, **options: Any) -> Trained:
    """The model after the Trainer's steps on `number` batches, `replicas` in each."""
    module = Trained(case, replicas)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=replicas, **QUIET, **options
    )
    trainer.fit(module, batches(case, number))
    return module


def compared(
    library: str, name: str, replicas: int, domain: tuple[int, ...]
) -> tuple[float, float, str]:
    """Errors of losses and of states after the steps, and the name of the worst state.

    Called on each rank; rank 0 knows the result.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as a launcher does
    case = cases(library)[name]
    number = STEPS * replicas
    strategy = lightning_shard.HybridShardStrategy(
        replicas, domain, {str(i): dims for i, dims in enumerate(case.dims_of_each(len(domain)))}
    )
    module = fitted(
        case, number, devices=dist.get_world_size(), strategy=strategy,
        plugins=[TorchElasticEnvironment()],
    )  # fmt: skip
    if not module.split:
        raise ValueError("the batches were not split")
    losses = torch.tensor(module.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    found = full_module_state(module)
    if dist.get_rank():
        return 0.0, 0.0, ""
    alone = fitted(case, number, replicas, devices=1, plugins=[LightningEnvironment()])
    expected = torch.tensor(alone.losses, dtype=torch.float64).view(STEPS, replicas).mean(1)
    loss = float(((losses / dist.get_world_size() - expected) / expected).abs().max())
    kept = dict(alone.named_parameters()) if replicas > 1 else alone.state_dict()
    begin = Trained(case).state_dict()
    moved = [
        (name, found[name] - begin[name], x.detach() - begin[name])
        for name, x in kept.items()
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    ]
    errors = relative_errors(moved)
    worst = max(errors, key=lambda name: errors[name])
    return loss, errors[worst], worst


def each(libraries: Sequence[str], function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """`function(library, model, *args)` of each library; an error is its words."""
    found: dict[str, Any] = {}
    for library in libraries:
        faulthandler.dump_traceback_later(WAIT_S, exit=True)
        try:
            with contextlib.redirect_stdout(None):  # some models print
                found[library] = function(library, MODELS[library], *args)
        except Exception as error:
            found[library] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0:
            print(library, dist.get_world_size(), found[library], file=sys.stderr, flush=True)
    return found


def print_steps(libraries: Sequence[str], meshes: Sequence[str]) -> None:
    """Print the table of errors after the steps."""
    found = []
    for replicas, domain in (MESHES[title] for title in meshes):
        ranks = replicas * math.prod(domain)
        given = libraries, compared, replicas, domain
        found.append(lightning_shard.launch(each, *given, processes=ranks)[0])
    rows = []
    for library in libraries:
        errors = [of_mesh[library] for of_mesh in found]
        cells = [e if isinstance(e, str) else f"{e[0]:.0e}, {e[1]:.0e}" for e in errors]
        rows.append((library, MODELS[library], *cells))
    table(("library", "model", *meshes), rows)


def main() -> None:
    """Print the tables of the libraries asked for."""
    parser = argparse.ArgumentParser(description="Unmodified models trained by the Trainer.")
    parser.add_argument("--library", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=[*MESHES])
    options = parser.parse_args()
    describe()
    libraries = [library for library in options.library if installed(library)]
    print_steps(libraries, options.mesh)


def installed(library: str) -> bool:
    """Whether it can be imported; if not, print why."""
    try:
        cases(library)
    except ImportError as error:
        print(f"{library} is not installed: {error}")
        return False
    return True


if __name__ == "__main__":
    main()
