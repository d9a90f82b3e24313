"""Anomalies in images: models of anomalib, trained by its Engine."""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.program_zoo import Parts, fields, folder, numbers, program, rows, without_weights

RANDOM = "random weights of the backbone"


def anomalies(name: str, size: int = 64, **options: Any) -> Parts:
    import anomalib.models
    from anomalib.data import ImageBatch, ImageItem
    from anomalib.engine import Engine
    from torchvision.tv_tensors import Image, Mask

    def item(i: int) -> Any:
        mask = torch.zeros(size, size, dtype=torch.bool)
        mask[8:24, 8:24] = bool(i % 2)
        image = Image(numbers(3, size, size, seed=i).sigmoid())
        return ImageItem(image=image, gt_label=torch.tensor(i % 2), gt_mask=Mask(mask))

    def loader(batch: int) -> Any:
        return DataLoader(fields(4, item), batch, collate_fn=ImageBatch.collate)

    kind = getattr(anomalib.models, name)
    with without_weights():
        module = kind(pre_processor=kind.configure_pre_processor((size, size)), **options)
    kept = {"enable_checkpointing": True, "default_root_dir": folder(name)}
    return Parts(module, loader, trainer=kept, engine=Engine)


rows(
    "anomalib",
    float32=True,
    changed=RANDOM,
    table={
        "anomalib_stfpm": partial(anomalies, "Stfpm"),
        "anomalib_reverse_distillation": partial(
            anomalies, "ReverseDistillation", backbone="resnet18",
            layers=["layer1", "layer2", "layer3"],
        ),
        "anomalib_fastflow": partial(anomalies, "Fastflow", backbone="resnet18", flow_steps=2),
    },
)  # fmt: skip
program("anomalib", name="anomalib_ganomaly", float32=True)(
    partial(anomalies, "Ganomaly", batch_size=2, n_features=8, latent_vec_size=16)
)
