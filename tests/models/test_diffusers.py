"""Networks of diffusers that remove noise, coders of images and videos, and a whole pipeline."""

import diffusers
import pytest
import torch

from benchmarks.model_zoo import cases, prepared
from lightning_shard import split_inputs
from tests.models.check import check
from tests.pairs import choose
from tests.parity import mesh_of


@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    "name",
    choose(["unet_1d", "unet_2d_condition", "wan", "vae", "vae_wan"], fast=["wan", "vae"]),
)
def test_three_ranks(name):
    check("diffusers", name, 3)


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "name", choose(["sd3", "cogvideox", "vae_hunyuan_video"], fast=["cogvideox"])
)
def test_two_split_dims(name):
    check("diffusers", name, 2, 2)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", ["vae", "vae_hunyuan_video", "vae_cogvideox"])
def test_a_coder_takes_and_gives_whole_images(name):
    case = cases("diffusers")[name]
    torch.manual_seed(5)
    (coder,) = prepared(case.make()).eval().modules_
    (x,) = case.tensors()
    with torch.inference_mode():
        latents = coder.encode(x).latent_dist.mode()
        expected = coder.decode(latents).sample
        with split_inputs(coder, mesh_of(3), case.dims[0], methods=["encode", "decode"]):
            found = coder.encode(x).latent_dist.mode()
            image = coder.decode(latents).sample
            there_and_back = coder.decode(found).sample
    for result in (image, there_and_back):
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.spmd(2)
def test_a_pipeline_as_it_is():
    torch.manual_seed(5)
    (network,) = prepared(cases("diffusers")["unet_2d"].make()).float().eval().modules_
    network.register_to_config(sample_size=(18, 12))
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=20)
    pipeline = diffusers.DDIMPipeline(network, scheduler)
    pipeline.set_progress_bar_config(disable=True)

    def images():
        generator = torch.Generator().manual_seed(3)
        options = {"num_inference_steps": 3, "output_type": "np", "generator": generator}
        return torch.from_numpy(pipeline(**options).images)

    expected = images()
    with split_inputs(network, mesh_of(2), {"sample": 2}):
        found = images()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
