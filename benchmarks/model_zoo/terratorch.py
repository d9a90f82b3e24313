"""terratorch: Prithvi, a vision transformer of several times of an image, with its decoder."""

import torch
from terratorch.models.backbones.prithvi_mae import PrithviMAE, PrithviViT

from benchmarks.model_zoo import Apply, Case

SIZES = {
    "img_size": 32, "patch_size": (1, 8, 8), "num_frames": 2, "in_chans": 3, "embed_dim": 32,
    "depth": 2, "num_heads": 2, "mlp_ratio": 2.0,
}  # fmt: skip
TIMES = torch.tensor([[[2020.0, 100.0], [2020.0, 200.0]]])
PLACE = torch.tensor([[47.0, 8.0]])
IMAGES = (1, 3, 2, 32, 32)


def features(model, x):
    return model.forward_features(x)


def placed_features(model, x):
    return model.forward_features(x, TIMES, PLACE)


def maps(model, x):
    """What a decoder of pixels is given."""
    return model.prepare_features_for_image_model(model.forward_features(x))


def hidden_pixels(model, x):
    """Prediction and loss, where half of the patches are hidden."""
    loss, predicted, _ = model(x, mask_ratio=0.5)
    return loss, predicted


def of(function, make=PrithviViT, size=IMAGES, tolerance=1e-10, **options):
    return Case(lambda: Apply(function, make(**SIZES | options)), [size], (3, 4), tolerance)


CASES = {
    "prithvi": of(features),
    "prithvi_placed": of(placed_features, tolerance=1e-5, coords_encoding=["time", "location"]),
    "prithvi_other_extent": of(features, size=(1, 3, 2, 48, 40)),
    "prithvi_maps": of(maps),
    "prithvi_prompts": of(features, vpt=True, vpt_n_tokens=3),
    "prithvi_masked": of(
        hidden_pixels, PrithviMAE, decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=2
    ),
}
