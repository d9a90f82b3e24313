"""miles-credit: networks of weather and climate."""

from credit.models.camulator import Camulator
from credit.models.crossformer import CrossFormer
from credit.models.fuxi import Fuxi
from credit.models.swin import SwinTransformerV2Cr
from credit.models.wxformer.crossformer import CrossFormer as WXFormer
from credit.models.wxformer.wxformer_next import NextGenWXFormer

from benchmarks.model_zoo import Float32, row

FIELDS = {"channels": 2, "surface_channels": 1, "input_only_channels": 1, "levels": 2}
GRID = {"image_height": 32, "image_width": 64}
CROSS = FIELDS | GRID | {
    "frames": 1, "dim": (8, 16, 32, 64), "depth": (1, 1, 1, 1), "dim_head": 4,
    "global_window_size": (2, 2, 2, 1), "local_window_size": 2,
    "cross_embed_kernel_sizes": ((2, 4), (2, 4), (2, 4), (2, 4)),
    "cross_embed_strides": (2, 2, 2, 2),
}  # fmt: skip
PADDED = {"activate": True, "mode": "earth", "pad_lat": (16, 16), "pad_lon": (16, 16)}
STATE = (1, 6, 1, 32, 64)

CASES = {
    "crossformer": row(CrossFormer, **CROSS, on=STATE, split=(3, 4)),
    "crossformer_padded": row(CrossFormer, **CROSS, padding_conf=PADDED, on=STATE, split=(3, 4)),
    "wxformer": row(WXFormer, **CROSS, on=STATE, split=(3, 4)),
    "wxformer_next": row(NextGenWXFormer, **CROSS, col_attn_heads=1, num_spectral_nodes=6, on=STATE,
        split=(3, 4)),
    "camulator": row(Camulator, **CROSS, on=STATE, split=(3, 4), within=1e-4, wrap=Float32),
    "fuxi": row(Fuxi, **GRID, **FIELDS, patch_height=4, patch_width=4, frames=2, frame_patch_size=2,
        dim=16, num_groups=4, num_heads=2, depth=2, window_size=2, on=(1, 6, 2, 32, 64),
        split=(3, 4), within=1e-4, wrap=Float32),
    "swin": row(SwinTransformerV2Cr, img_size=(32, 64), patch_size=2, window_size=4, **FIELDS,
        frames=1, embed_dim=8, depths=(2, 2), num_heads=(2, 2), on=STATE, split=(3, 4)),
}  # fmt: skip
