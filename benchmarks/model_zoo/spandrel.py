"""spandrel: networks that enlarge and restore images."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

import lightning_shard
from benchmarks.model_zoo import Case, row

IMAGE = (1, 3, 24, 16)


def part(place: str) -> Any:
    """What a name such as "ESRGAN.RRDB.RRDBNet" below spandrel.architectures means."""
    family, file, name = place.split(".")
    return getattr(importlib.import_module(f"spandrel.architectures.{family}.__arch.{file}"), name)


def net(place: str, *, on: Any = IMAGE, allow: tuple[str, ...] = (), **options: Any) -> Case:
    """A network; `allow` are autograd.Functions of its own, which a user has to allow."""
    settings = {name: options.pop(name) for name in ("within", "run") if name in options}

    def make(**options: Any) -> nn.Module:
        for name in allow:
            lightning_shard.allow_function(part(name))
        return part(place)(**options)

    return row(make, **options, on=on, **settings)


def hole() -> Tensor:
    """A mask of what is painted: 0 or 1."""
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.float64)
    mask[..., 9:21, 5:30] = 1
    return mask


BLOCKS = {"embed_dim": 12, "depths": [2], "num_heads": [2]}
SWIN = BLOCKS | {"img_size": 16, "window_size": 4, "mlp_ratio": 2.0}
SHUFFLED = {"upscale": 2, "upsampler": "pixelshuffle"}
GROUPS = {"embed_dim": 12, "depth": [2], "num_heads": [2], "img_size": 16}

CASES = {
    "esrgan": net("ESRGAN.RRDB.RRDBNet", num_filters=8, num_blocks=1),
    "esrgan_shuffle": net("ESRGAN.RRDB.RRDBNet", num_filters=8, num_blocks=1, scale=2,
        upsampler="pixel_shuffle"),
    "compact": net("Compact.SRVGG.SRVGGNetCompact", num_feat=8, num_conv=2),
    "span": net("SPAN.span.SPAN", num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=2),
    "swinir": net("SwinIR.SwinIR.SwinIR", **SWIN, **SHUFFLED),
    "swin2sr": net("Swin2SR.Swin2SR.Swin2SR", **SWIN, **SHUFFLED),
    "hat": net("HAT.HAT.HAT", **SWIN, upscale=2, squeeze_factor=4, num_feat=8),
    "dat": net("DAT.DAT.DAT", on=(2, 3, 24, 16), **(GROUPS | {"embed_dim": 32}), split_size=[2, 4],
        expansion_factor=2.0),
    "rgt": net("RGT.rgt.RGT", **GROUPS, split_size=[4, 4], mlp_ratio=2.0),
    "drct": net("DRCT.drct_arch.DRCT", **SWIN, **SHUFFLED, gc=4),
    # sorts with ties: those of a single row come in another order
    "atd": net("ATD.atd_arch.ATD", on=(2, 3, 24, 16), **SWIN, **SHUFFLED, category_size=16,
        num_tokens=6, reducted_dim=3),
    "craft": net("CRAFT.CRAFT.CRAFT", embed_dim=12, depths=[2], num_heads=[2], upscale=2,
        window_size=8, split_size_0=2, split_size_1=8),
    "omnisr": net("OmniSR.OmniSR.OmniSR", num_feat=16, window_size=4, up_scale=2,
        allow=("OmniSR.layernorm.LayerNormFunction",)),
    "ditn": net("DITN.DITN_Real.DITN_Real", dim=12, ITL_blocks=1, SAL_blocks=1, upscale=2),
    "dctlsa": net("DCTLSA.dctlsa.DCTLSA", nf=20, upscale=2, num_head=2),
    "fdat": net("FDAT.fdat.FDAT", scale=2, embed_dim=16, num_groups=1, depth_per_group=2,
        num_heads=2, window_size=4, mid_dim=8),
    "safmn": net("SAFMN.safmn.SAFMN", dim=8, n_blocks=2, upscaling_factor=2),
    "safmn_bcie": net("SAFMNBCIE.safmn_bcie.SAFMN_BCIE", dim=8, n_blocks=1, num_layers=1,
        ffn_scale=2.0),
    "seemore": net("SeemoRe.seemore_arch.SeemoRe", scale=2, num_layers=1, embedding_dim=12,
        within=1e-5),
    "plksr": net("PLKSR.PLKSR.PLKSR", dim=16, n_blocks=2, upscaling_factor=2),
    "real_plksr": net("PLKSR.RealPLKSR.RealPLKSR", dim=16, n_blocks=2, upscaling_factor=2),
    "real_plksr_dysample": net("PLKSR.RealPLKSR.RealPLKSR", dim=16, n_blocks=1,
        upscaling_factor=2, dysample=True),
    "mosr": net("MoSR.mosr_arch.MoSR", upscale=2, n_block=2, dim=12),
    "moesr": net("MoESR.MoESR.MoESR", scale=2, dim=12, n_blocks=1, n_block=1),
    "rcan": net("RCAN.rcan_arch.RCAN", scale=2, n_resgroups=1, n_resblocks=2, n_feats=16,
        run=lambda m, x: m(x.clone())),  # it multiplies its input in place
    "swift_srgan": net("SwiftSRGAN.SwiftSRGAN.Generator", num_channels=8, num_blocks=1,
        upscale_factor=2),
    "real_cugan": net("RealCUGAN.upcunet_v3.UpCunet2x", on=(1, 3, 48, 32)),
    "mm_real_sr": net("MMRealSR.mmrealsr_arch.MMRRDBNet_test", num_in_ch=3, num_out_ch=3,
        num_feat=8, num_block=1, num_grow_ch=4, num_feats=[8, 8, 8, 8], num_blocks=[1, 1, 1, 1]),
    "scunet": net("SCUNet.SCUNet.SCUNet", on=(1, 3, 64, 64), config=[1] * 7, dim=64,
        input_resolution=64),
    "dncnn": net("DnCNN.network_dncnn.DnCNN", on=(1, 3, 24, 16), in_nc=3, out_nc=3, nc=8, nb=4),
    "drunet": net("DRUNet.network_unet.DRUNet", in_nc=3, out_nc=3, nc=[8, 8, 16, 16], nb=1),
    "fbcnn": net("FBCNN.FBCNN.FBCNN", on=(1, 3, 32, 32), nc=[8, 8, 8, 512], nb=1),
    "nafnet": net("NAFNet.NAFNet_arch.NAFNet", width=8, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1],
        allow=("NAFNet.arch_util.LayerNormFunction",)),
    "kbnet_s": net("KBNet.kbnet_s.KBNet_s", width=8, middle_blk_num=1, enc_blk_nums=[1, 1],
        dec_blk_nums=[1, 1],
        allow=("KBNet.kb_utils.LayerNormFunction", "KBNet.kb_utils.KBAFunction")),
    "uformer": net("Uformer.Uformer.Uformer", on=(1, 3, 64, 64), img_size=64, embed_dim=8,
        depths=[1] * 9, num_heads=[1, 1, 2, 2, 2, 2, 2, 1, 1], win_size=2),
    "fftformer": net("FFTformer.fftformer_arch.FFTformer", on=(1, 3, 64, 32), within=1e-5, dim=8,
        num_blocks=[1, 1, 1], num_refinement_blocks=1),
    "retinexformer": net("RetinexFormer.retinexformer_arch.RetinexFormer", n_feat=8, stage=1),
    "hvi_cidnet": net("HVICIDNet.cidnet.CIDNet", channels=[8, 8, 16, 16], heads=[1, 2, 2, 4],
        on=lambda: torch.rand(*IMAGE, dtype=torch.float64)),
    "mix_dehaze": net("MixDehazeNet.MixDehazeNet.MixDehazeNet", on=(1, 3, 64, 48),
        embed_dims=[8, 8, 16, 8, 8]),
    "lama": net("LaMa.LaMa.LaMa", in_nc=4, on=[(1, 3, 32, 32), hole], within=1e-5),
    "restoreformer": net("RestoreFormer.restoreformer_arch.RestoreFormer", on=(1, 3, 32, 32),
        n_embed=16, embed_dim=32, ch=32, ch_mult=(1, 1), num_res_blocks=1, resolution=32,
        z_channels=32, head_size=2),
}  # fmt: skip
