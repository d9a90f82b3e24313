"""Denoising of microscopes' images: modules and data modules of CAREamics."""
# pyright: reportMissingImports=false

import random
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from benchmarks.program_zoo import Parts, numbers, rows

DOUBLE = "batches are cast to float64"
DESCENT = "SGD, since it runs in float32 alone, and Adam grows the rounding of vanishing gradients"


def denoising(kind: str, **options: Any) -> Parts:
    """Make the module and data module of `kind`, for patches of one noisy image."""
    import careamics.config.factories as factories
    import careamics.lightning as careamics

    random.seed(5)  # as seed_everything does: careamics draws the seed of its patches from it
    three = options.pop("three", False)
    config = getattr(factories, f"create_{kind}_config")(
        experiment_name="small",
        data_type="array",
        axes="ZYX" if three else "YX",
        patch_size=[8, 16, 16] if three else [32, 32],
        batch_size=2,
        num_steps=3,
        **options,
    )
    module = (careamics.N2VModule if kind.endswith("n2v") else careamics.CAREModule)(
        config.algorithm_config
    )
    module.on_before_batch_transfer = lambda batch, _: tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch
    )
    dtype = torch.get_default_dtype()
    shape = (16, 32, 32) if three else (64, 96)
    noisy = numbers(*shape).float().numpy()
    given = {"train_data": noisy, "val_data": noisy}
    if kind in ("care", "n2n"):
        clean = numbers(*shape, seed=1).float().numpy()
        given |= {"train_data_target": clean, "val_data_target": clean}

    def loader(batch: int) -> Any:
        config.data_config.batch_size = batch
        return careamics.CareamicsDataModule(config.data_config, **given)

    return Parts(module, loader, validates=False, trainer={"limit_val_batches": 2})


NOISE2VOID = partial(denoising, "advanced_n2v", optimizer="SGD", optimizer_params={"lr": 0.01})
rows(
    "careamics",
    changed=DOUBLE,
    table={
        "careamics_care": partial(denoising, "care"),
        "careamics_care_3d": partial(denoising, "care", three=True),
        "careamics_n2n": partial(denoising, "n2n"),
    },
)
rows(
    "careamics",
    float32=True,
    changed=DESCENT,
    table={"careamics_n2v": NOISE2VOID, "careamics_n2v2": partial(NOISE2VOID, use_n2v2=True)},
)
