"""nvidia-physicsnemo: networks of weather, climate and engineering."""

import torch
from physicsnemo.models.afno import AFNO, ModAFNO
from physicsnemo.models.diffusion_unets import (
    CorrDiffRegressionUNet,
    DhariwalUNet,
    SongUNet,
    SongUNetPosEmbd,
    StormCastUNet,
)
from physicsnemo.models.dit import DiT
from physicsnemo.models.dlwp import DLWP
from physicsnemo.models.dpot import DPOTNet
from physicsnemo.models.fengwu import Fengwu
from physicsnemo.models.flare import FLARE
from physicsnemo.models.fno import FNO
from physicsnemo.models.pangu import Pangu
from physicsnemo.models.pix2pix import Pix2Pix
from physicsnemo.models.rnn import One2ManyRNN, Seq2SeqRNN
from physicsnemo.models.srrn import SRResNet
from physicsnemo.models.swinvrnn import SwinRNN
from physicsnemo.models.topodiff import TopoDiff
from physicsnemo.models.transolver import Transolver
from physicsnemo.models.unet import UNet

from benchmarks.model_zoo import Float32, Float64Defaults, row

SMALL = {
    "model_channels": 8, "channel_mult": [1, 2], "num_blocks": 1, "attn_resolutions": [8],
    "dropout": 0.0,
}  # fmt: skip
TRANSOLVER = {"n_layers": 2, "n_hidden": 16, "n_head": 2, "slice_num": 4, "use_te": False}


def noised(model, x):
    """The model's result with the noise level as its second argument."""
    return model(x, torch.full((x.shape[0],), 0.7, dtype=x.dtype))


CASES = {
    "afno": row(AFNO, [32, 24], 3, 2, [4, 4], 16, 2, num_blocks=4, on=(1, 3, 32, 24), within=1e-4,
        wrap=Float32),
    "mod_afno": row(ModAFNO, [16, 12], 3, 2, patch_size=[2, 2], embed_dim=16, mod_dim=8, depth=2,
        num_blocks=2, embed_model={"dim": 8, "depth": 1}, on=(1, 3, 16, 12), within=1e-4,
        run=lambda m, x: m(x, torch.full((1, 1), 0.3)), wrap=Float32),
    "song_unet": row(SongUNet, 16, 3, 2, **SMALL, on=(1, 3, 16, 16), run=noised),
    "song_unet_ncsn": row(SongUNet, 16, 3, 2, **SMALL, embedding_type="fourier",
        encoder_type="residual", channel_mult_noise=2, resample_filter=[1, 3, 3, 1],
        on=(1, 3, 16, 16), run=noised),
    "song_unet_position": row(SongUNetPosEmbd, [16, 16], 7, 2, **SMALL, gridtype="learnable",
        on=(1, 3, 16, 16), run=noised),
    "dhariwal_unet": row(DhariwalUNet, 16, 3, 2, model_channels=32, channel_mult=[1, 2],
        num_blocks=1, attn_resolutions=[8], dropout=0.0, on=(1, 3, 16, 16), run=noised),
    "corrdiff_regression": row(CorrDiffRegressionUNet, (16, 16), 3, 2, model_type="SongUNet",
        **SMALL, on=[(1, 2, 16, 16), (1, 3, 16, 16)], within=1e-5, run=lambda m, x, low: m(x, low)),
    "stormcast": row(StormCastUNet, (16, 16), 3, 2, **SMALL, on=(1, 3, 16, 16), within=1e-5),
    "topodiff": row(TopoDiff, 16, 3, 1, model_channels=64, channel_mult=[1, 1], num_blocks=1,
        attn_resolutions=[8], on=[(1, 1, 16, 16), (1, 2, 16, 16)],
        run=lambda m, x, c: m(x, c, torch.tensor([3]))),
    "dit": row(DiT, (24, 16), 3, (2, 2), hidden_size=16, depth=2, num_heads=2, on=(1, 3, 24, 16),
        run=noised),
    "dit_conv": row(DiT, (24, 16), 3, (2, 2), hidden_size=16, depth=2, num_heads=2,
        detokenizer="proj_reshape_2d_conv", on=(1, 3, 24, 16), run=noised),
    "pangu": row(Pangu, (33, 48), embed_dim=12, num_heads=(2, 2, 2, 2), window_size=(2, 2, 4),
        on=(1, 72, 33, 48)),
    "fengwu": row(Fengwu, (33, 48), 3, 12, num_heads=(2, 2, 2, 2), window_size=(2, 2, 4),
        on=(1, 19, 33, 48)),
    "swin_rnn": row(SwinRNN, (2, 16, 16), (2, 1, 1), 4, 4, 16, 4, 2, 2, on=(1, 4, 2, 16, 16),
        split=(3, 4)),
    "dlwp": row(DLWP, 3, 2, 4, on=(1, 3, 6, 16, 16), split=(3, 4)),
    "dpot": row(DPOTNet, 24, 4, in_channels=2, out_channels=2, in_timesteps=3, num_blocks=2,
        embed_dim=16, depth=2, modes=4, out_layer_dim=8, on=(1, 24, 24, 3, 2), split=(1, 2),
        wrap=Float64Defaults),
    "fno": row(FNO, 3, 2, latent_channels=8, num_fno_layers=2, num_fno_modes=4, padding=2,
        on=(1, 3, 24, 20)),
    "fno_3d": row(FNO, 2, 2, dimension=3, latent_channels=4, num_fno_layers=2, num_fno_modes=3,
        padding=0, on=(1, 2, 12, 8, 8)),
    "srrn": row(SRResNet, 2, 2, conv_layer_size=8, n_resid_blocks=2, scaling_factor=2,
        on=(1, 2, 12, 8, 8)),
    "pix2pix": row(Pix2Pix, 3, 2, 2, 8, 2, 2, 1, on=(1, 3, 24, 16)),
    "unet": row(UNet, 2, 2, model_depth=2, feature_map_channels=(8, 8, 16, 16),
        normalization="batchnorm", on=(1, 2, 16, 12, 12)),
    "rnn_one2many": row(One2ManyRNN, 2, 2, 8, 1, nr_tsteps=3, on=(1, 2, 1, 24, 16), split=(3, 4)),
    "rnn_seq2seq": row(Seq2SeqRNN, 2, 2, 8, 1, nr_tsteps=3, on=(1, 2, 3, 24, 16), split=(3, 4)),
    "transolver": row(Transolver, 3, 2, 2, **TRANSOLVER, on=[(1, 37, 3), (1, 37, 2)], split=(1,)),
    "transolver_structured": row(Transolver, 3, 2, **TRANSOLVER, unified_pos=True,
        structured_shape=(12, 10), ref=2, on=(1, 12, 10, 3), split=(1, 2)),
    "flare": row(FLARE, 3, 2, 2, **TRANSOLVER, on=[(1, 37, 3), (1, 37, 2)], split=(1,)),
}  # fmt: skip
