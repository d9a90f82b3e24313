"""spandrel: networks that enlarge and restore images."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lightning_shard
from benchmarks.model_zoo import Apply, Case

IMAGE = (1, 3, 24, 16)


def of(place: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    """Makes the network `name` of a module of spandrel.architectures."""

    def make() -> nn.Module:
        family, file = place.split(".")
        module = importlib.import_module(f"spandrel.architectures.{family}.__arch.{file}")
        return getattr(module, name)(**options)

    return make


def case(place: str, name: str, *shape: int, tolerance: float = 1e-10, **options: Any) -> Case:
    return Case(of(place, name, **options), [shape or IMAGE], (2, 3), tolerance)


def allowed(place: str, make: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    """For a network with autograd.Functions of its own, which a user has to allow."""

    def made() -> nn.Module:
        family, file = place.split(".")
        module = importlib.import_module(f"spandrel.architectures.{family}.__arch.{file}")
        for name in ("LayerNormFunction", *names):
            lightning_shard.allow_function(getattr(module, name))
        return make()

    return made


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
    "esrgan": case("ESRGAN.RRDB", "RRDBNet", num_filters=8, num_blocks=1),
    "esrgan_shuffle": case("ESRGAN.RRDB", "RRDBNet", num_filters=8, num_blocks=1, scale=2,
        upsampler="pixel_shuffle"),
    "compact": case("Compact.SRVGG", "SRVGGNetCompact", num_feat=8, num_conv=2),
    "span": case("SPAN.span", "SPAN", num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=2),
    "swinir": case("SwinIR.SwinIR", "SwinIR", **SWIN, **SHUFFLED),
    "swin2sr": case("Swin2SR.Swin2SR", "Swin2SR", **SWIN, **SHUFFLED),
    "hat": case("HAT.HAT", "HAT", **SWIN, upscale=2, squeeze_factor=4, num_feat=8),
    "dat": case("DAT.DAT", "DAT", 2, 3, 24, 16, **(GROUPS | {"embed_dim": 32}), split_size=[2, 4],
        expansion_factor=2.0),
    "rgt": case("RGT.rgt", "RGT", **GROUPS, split_size=[4, 4], mlp_ratio=2.0),
    "drct": case("DRCT.drct_arch", "DRCT", **SWIN, **SHUFFLED, gc=4),
    "atd": case(  # sorts with ties: those of a single row come in another order
        "ATD.atd_arch", "ATD", 2, 3, 24, 16, **SWIN, **SHUFFLED, category_size=16, num_tokens=6,
        reducted_dim=3,
    ),
    "craft": case("CRAFT.CRAFT", "CRAFT", embed_dim=12, depths=[2], num_heads=[2], upscale=2,
        window_size=8, split_size_0=2, split_size_1=8),
    "omnisr": Case(allowed("OmniSR.layernorm", of("OmniSR.OmniSR", "OmniSR", num_feat=16,
        window_size=4, up_scale=2)), [IMAGE], (2, 3)),
    "ditn": case("DITN.DITN_Real", "DITN_Real", dim=12, ITL_blocks=1, SAL_blocks=1, upscale=2),
    "dctlsa": case("DCTLSA.dctlsa", "DCTLSA", nf=20, upscale=2, num_head=2),
    "fdat": case("FDAT.fdat", "FDAT", scale=2, embed_dim=16, num_groups=1, depth_per_group=2,
        num_heads=2, window_size=4, mid_dim=8),
    "safmn": case("SAFMN.safmn", "SAFMN", dim=8, n_blocks=2, upscaling_factor=2),
    "safmn_bcie": case("SAFMNBCIE.safmn_bcie", "SAFMN_BCIE", dim=8, n_blocks=1, num_layers=1,
        ffn_scale=2.0),
    "seemore": case("SeemoRe.seemore_arch", "SeemoRe", scale=2, num_layers=1, embedding_dim=12,
        tolerance=1e-5),
    "plksr": case("PLKSR.PLKSR", "PLKSR", dim=16, n_blocks=2, upscaling_factor=2),
    "real_plksr": case("PLKSR.RealPLKSR", "RealPLKSR", dim=16, n_blocks=2, upscaling_factor=2),
    "real_plksr_dysample": case("PLKSR.RealPLKSR", "RealPLKSR", dim=16, n_blocks=1,
        upscaling_factor=2, dysample=True),
    "mosr": case("MoSR.mosr_arch", "MoSR", upscale=2, n_block=2, dim=12),
    "moesr": case("MoESR.MoESR", "MoESR", scale=2, dim=12, n_blocks=1, n_block=1),
    "rcan": Case(  # it multiplies its input in place
        lambda: Apply(
            lambda m, x: m(x.clone()),
            of("RCAN.rcan_arch", "RCAN", scale=2, n_resgroups=1, n_resblocks=2, n_feats=16)(),
        ),
        [IMAGE], (2, 3),
    ),
    "swift_srgan": case("SwiftSRGAN.SwiftSRGAN", "Generator", num_channels=8, num_blocks=1,
        upscale_factor=2),
    "real_cugan": case("RealCUGAN.upcunet_v3", "UpCunet2x", 1, 3, 48, 32),
    "mm_real_sr": case("MMRealSR.mmrealsr_arch", "MMRRDBNet_test", num_in_ch=3, num_out_ch=3,
        num_feat=8, num_block=1, num_grow_ch=4, num_feats=[8, 8, 8, 8], num_blocks=[1, 1, 1, 1]),
    "scunet": case("SCUNet.SCUNet", "SCUNet", 1, 3, 64, 64, config=[1] * 7, dim=64,
        input_resolution=64),
    "dncnn": case("DnCNN.network_dncnn", "DnCNN", 1, 3, 24, 16, in_nc=3, out_nc=3, nc=8, nb=4),
    "drunet": case("DRUNet.network_unet", "DRUNet", in_nc=3, out_nc=3, nc=[8, 8, 16, 16], nb=1),
    "fbcnn": case("FBCNN.FBCNN", "FBCNN", 1, 3, 32, 32, nc=[8, 8, 8, 512], nb=1),
    "nafnet": Case(allowed("NAFNet.arch_util", of("NAFNet.NAFNet_arch", "NAFNet", width=8,
        enc_blk_nums=[1, 1], dec_blk_nums=[1, 1])), [IMAGE], (2, 3)),
    "kbnet_s": Case(allowed("KBNet.kb_utils", of("KBNet.kbnet_s", "KBNet_s", width=8,
        middle_blk_num=1, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1]), "KBAFunction"), [IMAGE],
        (2, 3)),
    "uformer": case("Uformer.Uformer", "Uformer", 1, 3, 64, 64, img_size=64, embed_dim=8,
        depths=[1] * 9, num_heads=[1, 1, 2, 2, 2, 2, 2, 1, 1], win_size=2),
    "fftformer": case("FFTformer.fftformer_arch", "FFTformer", 1, 3, 64, 32, tolerance=1e-5, dim=8,
        num_blocks=[1, 1, 1], num_refinement_blocks=1),
    "retinexformer": case("RetinexFormer.retinexformer_arch", "RetinexFormer", n_feat=8, stage=1),
    "hvi_cidnet": Case(of("HVICIDNet.cidnet", "CIDNet", channels=[8, 8, 16, 16],
        heads=[1, 2, 2, 4]), [lambda: torch.rand(*IMAGE, dtype=torch.float64)], (2, 3)),
    "mix_dehaze": case("MixDehazeNet.MixDehazeNet", "MixDehazeNet", 1, 3, 64, 48,
        embed_dims=[8, 8, 16, 8, 8]),
    "lama": Case(of("LaMa.LaMa", "LaMa", in_nc=4), [(1, 3, 32, 32), hole], (2, 3), 1e-5),
    "restoreformer": case("RestoreFormer.restoreformer_arch", "RestoreFormer", 1, 3, 32, 32,
        n_embed=16, embed_dim=32, ch=32, ch_mult=(1, 1), num_res_blocks=1, resolution=32,
        z_channels=32, head_size=2),
}  # fmt: skip
