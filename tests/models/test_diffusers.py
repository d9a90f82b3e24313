"""Networks of diffusers that remove noise, coders of images and videos, and whole pipelines."""

import json

import diffusers
import pytest
import torch
import transformers

from benchmarks.model_zoo import cases, prepared
from lightning_shard import split_inputs
from tests.models.check import check
from tests.pairs import choose
from tests.parity import mesh_of


@pytest.mark.slow
@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    "name",
    choose(["unet_1d", "unet_2d_condition", "wan", "vae", "vae_wan"], fast=["wan", "vae"]),
)
def test_three_ranks(name):
    check("diffusers", name, 3)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "name", choose(["sd3", "cogvideox", "vae_hunyuan_video"], fast=["cogvideox"])
)
def test_two_split_dims(name):
    check("diffusers", name, 2, 2)


@pytest.mark.slow
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


@pytest.mark.slow
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


def text_to_image(folder):
    """A pipeline with networks of Stable Diffusion's kind, small and of random weights."""
    torch.manual_seed(5)
    letters = [chr(c) for c in range(97, 123)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    config = transformers.CLIPTextConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=9, bos_token_id=0, eos_token_id=1,
        pad_token_id=1,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(
            3, 3, ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2, (8, 16), norm_num_groups=4
        ),
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer(*files, model_max_length=9),
        unet=diffusers.UNet2DConditionModel(
            in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
            norm_num_groups=4, cross_attention_dim=16, attention_head_dim=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        scheduler=diffusers.DDIMScheduler(num_train_timesteps=20),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    for network in (pipeline.vae, pipeline.text_encoder, pipeline.unet):
        network.double().eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.slow
@pytest.mark.spmd(3)
@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_with_all_networks_split(tmp_path):
    """The text over its tokens, latents and image over their rows; 20 rows on 3 ranks."""
    folder = tmp_path / str(torch.distributed.get_rank())
    folder.mkdir()
    pipeline, mesh = text_to_image(folder), mesh_of(3)

    def image():
        generator = torch.Generator().manual_seed(3)
        options = {"num_inference_steps": 3, "output_type": "pt", "generator": generator}
        return pipeline("a field", height=40, width=16, **options).images

    expected = image()
    with (
        split_inputs(pipeline.text_encoder, mesh, {"input_ids": 1}),
        split_inputs(pipeline.unet, mesh, {"sample": 2}),
        split_inputs(pipeline.vae, mesh, methods=["decode"]),
    ):
        found = image()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
