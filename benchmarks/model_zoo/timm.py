"""timm: one small model of every module."""

import timm

from benchmarks.model_zoo import row

TINY = {"depth": 2, "embed_dim": 24, "num_heads": 2}
FLAT = TINY | {"img_size": 64}
SHALLOW = {"img_size": 64, "depth": 2}
PAIRS = {"depths": (2, 2), "embed_dim": 24, "num_heads": (2, 2)}
TWO_HEADS = {"num_heads": (2, 2, 2, 2)}
TWINS = TWO_HEADS | {"depths": (1, 2, 2, 1), "embed_dims": (16, 32, 32, 32)}

# the models with their own options, by the extent of the samples
AS_THEY_ARE = {
    (2, 3, 97, 70): (
        "test_byobnet mobileone_s1 test_convnext test_convnext2 test_convnext3 "
        "cs3darknet_focus_s cs3darknet_s cspnext_tiny densenet121 densenetblur121d dpn48b "
        "edgenext_xx_small test_efficientnet test_efficientnet_gn tf_efficientnet_b0 fasternet_t0 "
        "ghostnet_050 ghostnetv3_050 hardcorenas_a hgnetv2_b0 lcnetv2_small lcnet_035 "
        "mobilenetv3_small_050 tf_mobilenetv3_small_minimal_100 test_mambaout inception_next_atto "
        "poolformerv2_s12 poolformer_s12 test_nfnet nf_regnet_b0 dm_nfnet_f0 regnetx_002 "
        "regnety_002 repghostnet_050 repvit_m1 res2next50 resnest14d test_resnet resnet10t "
        "resnet18 resnet26d ecaresnet26t resnetblur50 resnetv2_18 resnetv2_50d_gn selecsls42 "
        "legacy_seresnet18 starnet_s050 convmixer_768_32 repvgg_a0 gernet_s vovnet39a "
        "ese_vovnet19b_dw xception41 mixnet_s cpubone_nano caformer_s18 convformer_s18 fastvit_t8 "
        "vgg11_bn xcit_nano_12_p8_224 pvt_v2_b0 shvit_s1 legacy_xception convnextv2_atto "
        "mobilenetv4_conv_small gcresnext26ts"
    ),
    (2, 3, 107, 98): "inception_v3",
    (2, 3, 127, 98): "inception_v4 inception_resnet_v2",
    (2, 3, 129, 98): "rexnet_100 skresnet18",
    (2, 3, 96, 68): "tresnet_m",
    (2, 3, 96, 64): "dla46_c hrnet_w18_small mobilevit_xxs mobilevitv2_050",
    (1, 3, 96, 64): "lowformer_b0 swiftformer_xs fastvit_sa12",
    (1, 3, 96, 96): "tiny_vit_5m_224",
    (1, 3, 97, 70): "rdnet_tiny nextvit_small",
    (1, 3, 128, 128): "efficientvim_m1",
    (2, 3, 160, 160): "test_coatnet test_maxvit test_vit test_vit2 test_vit3 test_vit4",
    (1, 3, 224, 224): (
        "coat_tiny coat_lite_tiny efficientformerv2_s0 gcvit_xxtiny hiera_tiny_224 pit_ti_224 "
        "visformer_tiny coatnet_nano_rw_224 coatnet_rmlp_nano_rw_224 coatnext_nano_rw_224"
    ),
    (2, 3, 224, 224): "efficientformer_l1",
    (1, 3, 240, 240): "crossvit_tiny_240",
    (1, 3, 256, 256): (
        "eca_botnext26ts_256 csatv2 hieradet_small bat_resnext26ts sehalonet33ts "
        "maxvit_rmlp_pico_rw_256"
    ),
    # two samples: of one, torch's own batch_norm has wrong gradients, see docs/models.md
    (2, 3, 256, 256): "lambda_resnet26t",
}


def net(name, *, on=(2, 3, 64, 64), within=1e-10, **options):
    return row(
        timm.create_model, name, pretrained=False, num_classes=5, **options, on=on, within=within
    )


CASES = {name: net(name, on=on) for on, names in AS_THEY_ARE.items() for name in names.split()} | {
    "test_efficientnet_evos": net("test_efficientnet_evos", on=(2, 3, 97, 70), within=1e-5),
    "efficientvit_b0": net("efficientvit_b0", on=(2, 3, 97, 70), within=1e-5),
    "naflexvit_base_patch16_gap": net("naflexvit_base_patch16_gap", **TINY, on=(1, 3, 64, 80),
        within=1e-5),
} | {
    name: net(name, **options)
    for name, options in {
        "beit_base_patch16_224": FLAT,
        "beitv2_base_patch16_224": FLAT | {"use_rel_pos_bias": True},
        "cait_xxs24_224": FLAT,
        "convit_tiny": SHALLOW | {"local_up_to_layer": 1},
        "deit_tiny_patch16_224": FLAT,
        "deit_tiny_distilled_patch16_224": FLAT,
        "deit3_small_patch16_224": TINY | {"img_size": (64, 80), "on": (2, 3, 64, 80)},
        "eva02_tiny_patch14_224": TINY | {"img_size": 56, "on": (2, 3, 56, 56)},
        "vit_tiny_patch16_dinov3_qkvb": {"depth": 2, "on": (2, 3, 64, 80)},
        "tnt_s_legacy_patch16_224": SHALLOW,
        "vit_relpos_small_patch16_224": FLAT,
        "vit_srelpos_small_patch16_224": FLAT,
        "vitamin_small_224": SHALLOW | {"on": (1, 3, 64, 64)},
        "vit_small_r26_s32_224": FLAT,
        "vit_pe_core_tiny_patch16_384": SHALLOW | {"on": (1, 3, 64, 64)},
        "samvit_base_patch16_224": TINY | {"img_size": 128, "window_size": 3,
            "global_attn_indexes": (1,), "on": (1, 3, 128, 128)},
        "davit_tiny": TWO_HEADS | {"depths": (1, 1, 1, 1), "embed_dims": (24, 48, 48, 48),
            "on": (1, 3, 97, 70)},
        "sequencer2d_s": {"layers": (1, 1, 1, 1), "on": (1, 3, 224, 224)},
        "swin_tiny_patch4_window7_224": PAIRS | {"img_size": 112, "on": (1, 3, 112, 112)},
        "swin_s3_tiny_224": TWO_HEADS | {"depths": (1, 1, 2, 1), "embed_dim": 24,
            "on": (1, 3, 224, 224)},
        "swinv2_tiny_window8_256": PAIRS | {"img_size": 128, "on": (1, 3, 128, 128)},
        "swinv2_cr_tiny_224": PAIRS | {"img_size": 112, "window_size": 7, "on": (1, 3, 112, 112)},
        "twins_svt_small": TWINS | {"on": (1, 3, 224, 224)},
        "twins_pcpvt_small": TWINS | {"on": (1, 3, 224, 224)},
    }.items()
}  # fmt: skip
