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

from benchmarks.model_zoo import Apply, Case, Float32, Float64Defaults, called

SMALL = {
    "model_channels": 8, "channel_mult": [1, 2], "num_blocks": 1, "attn_resolutions": [8],
    "dropout": 0.0,
}  # fmt: skip
TRANSOLVER = {"n_layers": 2, "n_hidden": 16, "n_head": 2, "slice_num": 4, "use_te": False}


def noised(make):
    """With the noise level as the second argument."""
    return lambda: Apply(lambda m, x: m(x, torch.full((x.shape[0],), 0.7, dtype=x.dtype)), make())


CASES = {
    "afno": Case(lambda: Float32(called, AFNO([32, 24], 3, 2, [4, 4], 16, 2, num_blocks=4)),
        [(1, 3, 32, 24)], (2, 3), 1e-4),
    "mod_afno": Case(lambda: Float32(lambda m, x: m(x, torch.full((1, 1), 0.3)), ModAFNO([16, 12],
        3, 2, patch_size=[2, 2], embed_dim=16, mod_dim=8, depth=2, num_blocks=2,
        embed_model={"dim": 8, "depth": 1})), [(1, 3, 16, 12)], (2, 3), 1e-4),
    "song_unet": Case(noised(lambda: SongUNet(16, 3, 2, **SMALL)), [(1, 3, 16, 16)], (2, 3)),
    "song_unet_ncsn": Case(noised(lambda: SongUNet(16, 3, 2, **SMALL, embedding_type="fourier",
        encoder_type="residual", channel_mult_noise=2, resample_filter=[1, 3, 3, 1])),
        [(1, 3, 16, 16)], (2, 3)),
    "song_unet_position": Case(
        noised(lambda: SongUNetPosEmbd([16, 16], 7, 2, **SMALL, gridtype="learnable")),
        [(1, 3, 16, 16)], (2, 3),
    ),
    "dhariwal_unet": Case(noised(lambda: DhariwalUNet(16, 3, 2, model_channels=32,
        channel_mult=[1, 2], num_blocks=1, attn_resolutions=[8], dropout=0.0)), [(1, 3, 16, 16)],
        (2, 3)),
    "corrdiff_regression": Case(lambda: Apply(lambda m, x, low: m(x, low),
        CorrDiffRegressionUNet((16, 16), 3, 2, model_type="SongUNet", **SMALL)),
        [(1, 2, 16, 16), (1, 3, 16, 16)], (2, 3), 1e-5),
    "stormcast": Case(lambda: StormCastUNet((16, 16), 3, 2, **SMALL), [(1, 3, 16, 16)], (2, 3),
        1e-5),
    "topodiff": Case(lambda: Apply(lambda m, x, c: m(x, c, torch.tensor([3])), TopoDiff(16, 3, 1,
        model_channels=64, channel_mult=[1, 1], num_blocks=1, attn_resolutions=[8])),
        [(1, 1, 16, 16), (1, 2, 16, 16)], (2, 3)),
    "dit": Case(noised(lambda: DiT((24, 16), 3, (2, 2), hidden_size=16, depth=2, num_heads=2)),
        [(1, 3, 24, 16)], (2, 3)),
    "dit_conv": Case(noised(lambda: DiT((24, 16), 3, (2, 2), hidden_size=16, depth=2, num_heads=2,
        detokenizer="proj_reshape_2d_conv")), [(1, 3, 24, 16)], (2, 3)),
    "pangu": Case(lambda: Pangu((33, 48), embed_dim=12, num_heads=(2, 2, 2, 2),
        window_size=(2, 2, 4)), [(1, 72, 33, 48)], (2, 3)),
    "fengwu": Case(lambda: Fengwu((33, 48), 3, 12, num_heads=(2, 2, 2, 2), window_size=(2, 2, 4)),
        [(1, 19, 33, 48)], (2, 3)),
    "swin_rnn": Case(lambda: SwinRNN((2, 16, 16), (2, 1, 1), 4, 4, 16, 4, 2, 2),
        [(1, 4, 2, 16, 16)], (3, 4)),
    "dlwp": Case(lambda: DLWP(3, 2, 4), [(1, 3, 6, 16, 16)], (3, 4)),
    "dpot": Case(lambda: Float64Defaults(called, DPOTNet(24, 4, in_channels=2, out_channels=2,
        in_timesteps=3, num_blocks=2, embed_dim=16, depth=2, modes=4, out_layer_dim=8)),
        [(1, 24, 24, 3, 2)], (1, 2)),
    "fno": Case(lambda: FNO(3, 2, latent_channels=8, num_fno_layers=2, num_fno_modes=4, padding=2),
        [(1, 3, 24, 20)], (2, 3)),
    "fno_3d": Case(lambda: FNO(2, 2, dimension=3, latent_channels=4, num_fno_layers=2,
        num_fno_modes=3, padding=0), [(1, 2, 12, 8, 8)], (2, 3, 4)),
    "srrn": Case(lambda: SRResNet(2, 2, conv_layer_size=8, n_resid_blocks=2, scaling_factor=2),
        [(1, 2, 12, 8, 8)], (2, 3, 4)),
    "pix2pix": Case(lambda: Pix2Pix(3, 2, 2, 8, 2, 2, 1), [(1, 3, 24, 16)], (2, 3)),
    "unet": Case(lambda: UNet(2, 2, model_depth=2, feature_map_channels=(8, 8, 16, 16),
        normalization="batchnorm"), [(1, 2, 16, 12, 12)], (2, 3, 4)),
    "rnn_one2many": Case(lambda: One2ManyRNN(2, 2, 8, 1, nr_tsteps=3), [(1, 2, 1, 24, 16)], (3, 4)),
    "rnn_seq2seq": Case(lambda: Seq2SeqRNN(2, 2, 8, 1, nr_tsteps=3), [(1, 2, 3, 24, 16)], (3, 4)),
    "transolver": Case(lambda: Transolver(3, 2, 2, **TRANSOLVER), [(1, 37, 3), (1, 37, 2)], (1,)),
    "transolver_structured": Case(lambda: Transolver(3, 2, **TRANSOLVER, unified_pos=True,
        structured_shape=(12, 10), ref=2), [(1, 12, 10, 3)], (1, 2)),
    "flare": Case(lambda: FLARE(3, 2, 2, **TRANSOLVER), [(1, 37, 3), (1, 37, 2)], (1,)),
}  # fmt: skip
