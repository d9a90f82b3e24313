"""vit_pytorch: transformers of images and videos, without dropout."""

import importlib
from typing import Any

from torch import nn

from benchmarks.model_zoo import Case, Float64Defaults, row

IMAGE, LARGE, VIDEO = (2, 3, 32, 32), (1, 3, 64, 64), (1, 3, 4, 32, 32)
VIT = {
    "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2,
    "mlp_dim": 32,
}  # fmt: skip
CUBES = {**VIT, "frames": 4, "image_patch_size": 8, "frame_patch_size": 2}
CUBES.pop("patch_size")
STAGES = {"num_classes": 5, "dim": (8, 8, 8, 8), "depth": (1, 1, 1, 1)}
WINDOWS = {"num_classes": 5, "dim": 8, "depth": (1, 1), "dim_head": 4, "window_size": 4}
CVT = {f"s{i}_{n}": v for i in (1, 2, 3) for n, v in {"emb_dim": 8, "heads": 1, "depth": 1}.items()}
TWINS = {f"s{i}_{n}": v for i in (1, 2, 3, 4) for n, v in {"emb_dim": 8, "depth": 1}.items()}
TWINS |= {f"s{i}_global_k": k for i, k in enumerate((4, 4, 2, 1), 1)}
TWINS |= {f"s{i}_local_patch_size": n for i, n in enumerate((4, 4, 2), 1)}
CROSS = {
    f"{size}_{name}": value
    for size in ("sm", "lg")
    for name, value in {"enc_depth": 1, "enc_heads": 2, "enc_mlp_dim": 16}.items()
}


def network(module: str, kind: str, on: tuple[int, ...], **options: Any) -> Case:
    def make(**options: Any) -> nn.Module:
        return getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(**options)

    split = (len(on) - 2, len(on) - 1)
    return row(make, **options, on=on, split=split, wrap=Float64Defaults)


def vit(module: str, kind: str = "ViT", **options: Any) -> Case:
    return network(module, kind, IMAGE, **VIT | options)


CASES = {
    "vit": vit("vit"),
    "cait": vit("cait", "CaiT", cls_depth=1),
    "cct": network("cct", "CCT", IMAGE, img_size=32, embedding_dim=16, n_conv_layers=1,
        kernel_size=3, stride=2, padding=1, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=5,
        dropout_rate=0.0, stochastic_depth_rate=0.0),
    "cross_vit": network("cross_vit", "CrossViT", IMAGE, image_size=32, num_classes=5, depth=1,
        sm_dim=16, sm_patch_size=8, lg_dim=24, lg_patch_size=16, cross_attn_depth=1,
        cross_attn_heads=2, **CROSS),
    "cvt": network("cvt", "CvT", LARGE, num_classes=5, **CVT),
    "decorrelated": vit("vit_with_decorr"),
    "deepvit": vit("deepvit", "DeepViT"),
    "fft": vit("simple_vit_with_fft", "SimpleViT", freq_patch_size=8),
    "hyper_connections": vit("simple_vit_with_hyper_connections", "SimpleViT",
        num_residual_streams=2),
    "jumbo": vit("jumbo_vit", "JumboViT", num_jumbo_cls=1, jumbo_cls_k=2),
    "learnable_memory": vit("learnable_memory_vit"),
    "levit": network("levit", "LeViT", (2, 3, 64, 64), image_size=64, num_classes=5, stages=3,
        dim=(16, 16, 16), depth=1, heads=(2, 2, 2), mlp_mult=2),
    "max_vit": network("max_vit", "MaxViT", (2, 3, 32, 32), **WINDOWS, dropout=0.0),
    "max_vit_registers": network("max_vit_with_registers", "MaxViT", (2, 3, 32, 32), **WINDOWS,
        dropout=0.0),
    "mobile_vit": network("mobile_vit", "MobileViT", LARGE, image_size=(64, 64), dims=[16, 20, 24],
        channels=[*[8] * 10, 16], num_classes=5),
    "nest": network("nest", "NesT", IMAGE, image_size=32, patch_size=4, dim=16, heads=2,
        num_hierarchies=2, block_repeats=(1, 1), num_classes=5),
    "normalized": vit("normalized_vit", "nViT"),
    "parallel": vit("parallel_vit", num_parallel_branches=2),
    "patch_merger": vit("vit_with_patch_merger", patch_merge_layer=1, patch_merge_num_tokens=2),
    "pit": network("pit", "PiT", IMAGE, **VIT | {"depth": (1, 1)}),
    "qk_norm": vit("simple_vit_with_qk_norm", "SimpleViT"),
    "region_vit": network("regionvit", "RegionViT", LARGE, **STAGES, window_size=2,
        tokenize_local_3_conv=True, use_peg=True),
    "register_tokens": vit("simple_vit_with_register_tokens", "SimpleViT", num_register_tokens=3),
    "rvt": vit("rvt", "RvT"),
    "scalable": network("scalable_vit", "ScalableViT", (1, 3, 32, 32), num_classes=5, dim=8,
        heads=(1, 1), depth=(1, 1), ssa_dim_key=(4, 4), reduction_factor=(2, 1),
        window_size=(4, None)),
    "simple_uvit": vit("simple_uvit", "SimpleUViT", num_register_tokens=2),
    "simple_vit": vit("simple_vit", "SimpleViT"),
    "small_dataset": vit("vit_for_small_dataset"),
    "t2t": network("t2t", "T2TViT", IMAGE, dim=16, image_size=32, depth=1, heads=2, mlp_dim=16,
        num_classes=5, t2t_layers=((7, 4), (3, 2))),
    "twins": network("twins_svt", "TwinsSVT", LARGE, num_classes=5, **TWINS),
    "value_residual": vit("simple_vit_with_value_residual", "SimpleViT"),
    "vit_3d": network("vit_3d", "ViT", VIDEO, **CUBES),
    "xcit": vit("xcit", "XCiT", cls_depth=1),
}  # fmt: skip
