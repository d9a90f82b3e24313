"""Names the cases of `benchmarks.forecast`: networks, meshes, and the error that is aimed at."""

from typing import Any

Mesh = tuple[int, ...]  # data replicas, and the ranks along each split dim
Case = dict[str, Any]
NETWORKS = ("CNN", "U-Net", "TFNO", "ViT")
MESHES: dict[int, tuple[Mesh, ...]] = {
    1: ((1, 1),),
    2: ((2, 1), (1, 2)),
    4: ((4, 1), (2, 2), (1, 4), (1, 2, 2)),
}
BAR = 0.15  # the error of a step's time that the prediction aims at
