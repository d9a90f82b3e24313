"""timm: one small model of every module."""

import timm

from benchmarks.model_zoo import Case

FREE = (2, 3, 97, 70)
FIXED = (1, 3, 224, 224)


def net(name, **options):
    return lambda: timm.create_model(name, pretrained=False, num_classes=5, **options)


TINY = {"depth": 2, "embed_dim": 24, "num_heads": 2}
# name: options, input
MODELS = {
    # convolutional, any extent
    **{
        name: ({}, FREE)
        for name in (
            "test_byobnet mobileone_s1 test_convnext test_convnext2 test_convnext3 "
            "cs3darknet_focus_s cs3darknet_s cspnext_tiny dla46_c densenet121 "
            "densenetblur121d dpn48b edgenext_xx_small test_efficientnet test_efficientnet_gn "
            "test_efficientnet_evos tf_efficientnet_b0 efficientvit_b0 fasternet_t0 "
            "ghostnet_050 ghostnetv3_050 hardcorenas_a hgnetv2_b0 lcnetv2_small lcnet_035 "
            "mobilenetv3_small_050 tf_mobilenetv3_small_minimal_100 hrnet_w18_small "
            "test_mambaout inception_next_atto poolformerv2_s12 poolformer_s12 test_nfnet "
            "nf_regnet_b0 dm_nfnet_f0 regnetx_002 regnety_002 repghostnet_050 repvit_m1 "
            "res2next50 resnest14d test_resnet resnet10t resnet18 resnet26d ecaresnet26t "
            "resnetblur50 resnetv2_18 resnetv2_50d_gn rexnet_100 selecsls42 legacy_seresnet18 "
            "skresnet18 starnet_s050 convmixer_768_32 repvgg_a0 gernet_s vovnet39a "
            "ese_vovnet19b_dw xception41 tresnet_m mixnet_s cpubone_nano caformer_s18 "
            "convformer_s18 fastvit_t8 vgg11_bn xcit_nano_12_p8_224 pvt_v2_b0 shvit_s1"
        ).split()
    },
    "inception_v3": ({}, (2, 3, 107, 98)),
    "inception_v4": ({}, (2, 3, 127, 98)),
    "inception_resnet_v2": ({}, (2, 3, 127, 98)),
    "legacy_xception": ({}, (2, 3, 97, 70)),
    # blocks that need multiples
    # two samples: of one, torch's own batch_norm has wrong gradients, see docs/models.md
    "lambda_resnet26t": ({}, (2, 3, 256, 256)),
    "eca_botnext26ts_256": ({}, (1, 3, 256, 256)),
    "mobilevit_xxs": ({}, (2, 3, 96, 64)),
    "mobilevitv2_050": ({}, (2, 3, 96, 64)),
    "davit_tiny": (
        {"depths": (1, 1, 1, 1), "embed_dims": (24, 48, 48, 48), "num_heads": (2, 2, 2, 2)},
        (1, 3, 97, 70),
    ),
    "tiny_vit_5m_224": ({}, (1, 3, 96, 96)),
    "rdnet_tiny": ({}, (1, 3, 97, 70)),
    "nextvit_small": ({}, (1, 3, 97, 70)),
    "csatv2": ({}, (1, 3, 256, 256)),
    "efficientvim_m1": ({}, (1, 3, 128, 128)),
    "lowformer_b0": ({}, (1, 3, 96, 64)),
    "swiftformer_xs": ({}, (1, 3, 96, 64)),
    "sequencer2d_s": ({"layers": (1, 1, 1, 1)}, (1, 3, 224, 224)),
    "test_coatnet": ({}, (2, 3, 160, 160)),
    "test_maxvit": ({}, (2, 3, 160, 160)),
    "test_vit": ({}, (2, 3, 160, 160)),
    "test_vit2": ({}, (2, 3, 160, 160)),
    "test_vit3": ({}, (2, 3, 160, 160)),
    "test_vit4": ({}, (2, 3, 160, 160)),
    # transformers
    "beit_base_patch16_224": ({"img_size": 64, **TINY}, (2, 3, 64, 64)),
    "beitv2_base_patch16_224": ({"img_size": 64, "use_rel_pos_bias": True, **TINY}, (2, 3, 64, 64)),
    "cait_xxs24_224": ({"img_size": 64, **TINY}, (2, 3, 64, 64)),
    "coat_tiny": ({}, FIXED),
    "coat_lite_tiny": ({}, FIXED),
    "convit_tiny": ({"img_size": 64, "depth": 2, "local_up_to_layer": 1}, (2, 3, 64, 64)),
    "crossvit_tiny_240": ({}, (1, 3, 240, 240)),
    "deit_tiny_patch16_224": ({"img_size": 64, **TINY}, (2, 3, 64, 64)),
    "deit_tiny_distilled_patch16_224": ({"img_size": 64, **TINY}, (2, 3, 64, 64)),
    "deit3_small_patch16_224": ({"img_size": (64, 80), **TINY}, (2, 3, 64, 80)),
    "efficientformer_l1": ({}, (2, 3, 224, 224)),
    "efficientformerv2_s0": ({}, FIXED),
    "eva02_tiny_patch14_224": ({"img_size": 56, **TINY}, (2, 3, 56, 56)),
    "vit_tiny_patch16_dinov3_qkvb": ({"depth": 2}, (2, 3, 64, 80)),
    "gcvit_xxtiny": ({}, FIXED),
    "hiera_tiny_224": ({}, FIXED),
    "pit_ti_224": ({}, FIXED),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 112, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 2)},
        (1, 3, 112, 112),
    ),
    "swin_s3_tiny_224": (
        {"depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (2, 2, 2, 2)},
        FIXED,
    ),
    "swinv2_tiny_window8_256": (
        {"img_size": 128, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 2)},
        (1, 3, 128, 128),
    ),
    "swinv2_cr_tiny_224": (
        {"img_size": 112, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 2), "window_size": 7},
        (1, 3, 112, 112),
    ),
    "tnt_s_legacy_patch16_224": ({"img_size": 64, "depth": 2}, (2, 3, 64, 64)),
    "twins_svt_small": (
        {"depths": (1, 2, 2, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (2, 2, 2, 2)},
        FIXED,
    ),
    "twins_pcpvt_small": (
        {"depths": (1, 2, 2, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (2, 2, 2, 2)},
        FIXED,
    ),
    "visformer_tiny": ({}, FIXED),
    "vit_relpos_small_patch16_224": ({"img_size": 64, **TINY}, (2, 3, 64, 64)),
    "vit_srelpos_small_patch16_224": ({"img_size": 64, **TINY}, (2, 3, 64, 64)),
    "samvit_base_patch16_224": (
        {"img_size": 128, "window_size": 3, "global_attn_indexes": (1,), **TINY},
        (1, 3, 128, 128),
    ),
    "vitamin_small_224": ({"img_size": 64, "depth": 2}, (1, 3, 64, 64)),
    "vit_small_r26_s32_224": ({"img_size": 64, **TINY}, (2, 3, 64, 64)),
    "convnextv2_atto": ({}, FREE),
    "fastvit_sa12": ({}, (1, 3, 96, 64)),
    "vit_pe_core_tiny_patch16_384": ({"img_size": 64, "depth": 2}, (1, 3, 64, 64)),
    "hieradet_small": ({}, (1, 3, 256, 256)),
    "mobilenetv4_conv_small": ({}, FREE),
    "bat_resnext26ts": ({}, (1, 3, 256, 256)),
    "gcresnext26ts": ({}, FREE),
    "sehalonet33ts": ({}, (1, 3, 256, 256)),
}
MODELS |= {
    "coatnet_nano_rw_224": ({}, FIXED),
    "coatnet_rmlp_nano_rw_224": ({}, FIXED),
    "maxvit_rmlp_pico_rw_256": ({}, (1, 3, 256, 256)),
    "coatnext_nano_rw_224": ({}, FIXED),
}
CASES = {
    name: Case(net(name, **options), [shape], (2, 3)) for name, (options, shape) in MODELS.items()
}

CASES |= {
    "dla46_c": Case(net("dla46_c"), [(2, 3, 96, 64)], (2, 3)),
    "hrnet_w18_small": Case(net("hrnet_w18_small"), [(2, 3, 96, 64)], (2, 3)),
    "tresnet_m": Case(net("tresnet_m"), [(2, 3, 96, 68)], (2, 3)),
    "test_efficientnet_evos": Case(net("test_efficientnet_evos"), [FREE], (2, 3), 1e-5),
    "efficientvit_b0": Case(net("efficientvit_b0"), [FREE], (2, 3), 1e-5),
    "rexnet_100": Case(net("rexnet_100"), [(2, 3, 129, 98)], (2, 3)),
    "skresnet18": Case(net("skresnet18"), [(2, 3, 129, 98)], (2, 3)),
    "naflexvit_base_patch16_gap": Case(
        net("naflexvit_base_patch16_gap", **TINY), [(1, 3, 64, 80)], (2, 3), 1e-5
    ),
}
