"""transformers: text, sound and time series, split along the sequence, of small configurations.

Among them are state-space and recurrent models, and caches of keys and values.
"""

import torch
import transformers as tf
from torch import Tensor
from transformers.models.bloom.modeling_bloom import GeLUFunction
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

import lightning_shard
from benchmarks.model_zoo import row

lightning_shard.allow_function(GeLUFunction)  # without this line bloom is refused
lightning_shard.allow_function(SqrtBoundDerivative)  # without this one recurrent_gemma

FLOAT32 = 1e-5  # norms, softmax or rotations are computed in float32
WORDS = {"vocab_size": 32}
SIZE = {"hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "intermediate_size": 32}
TEXT = WORDS | SIZE | HEADS
ROPE = TEXT | {"num_key_value_heads": 1, "max_position_embeddings": 32}
WIDTH = {"d_model": 16}
T5 = WORDS | WIDTH | {
    "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
GPT2 = WORDS | {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
CODERS = WORDS | WIDTH | {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 32}.items()
}  # fmt: skip
SPOKEN = TEXT | {
    "conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}  # fmt: skip
SSM = {"expand": 2, "n_groups": 1, "state_size": 4, "chunk_size": 4}
WITHOUT_CACHE = {"use_cache": False}
FIVE_LABELS = torch.arange(10).reshape(2, 5)
KEPT = torch.arange(11).expand(2, 11) < torch.tensor([[11], [7]])
EMBEDDED = (2, 11, 16)


def built(model, **options):
    """The model of the configuration that belongs to its class."""
    return model(model.config_class(**options))


def ids():
    return torch.randint(3, 32, (2, 11))


def of(name, on, *, axis=1):
    """Makes rows of models that take the split input as the argument `name`."""

    def make(model, *, within=1e-10, call=None, **options):
        def run(m, x):
            return m(**{name: x}, **call or {})

        return row(built, model, **options, on=on, split=(axis,), within=within, run=run)

    return make


of_ids, of_embeddings = of("input_ids", ids), of("inputs_embeds", EMBEDDED)


def of_labels(model, *, within=1e-10, **options):
    return row(
        built, model, **options, on=ids, split=(1,), within=within,
        run=lambda m, x: m(input_ids=x, labels=x),
    )  # fmt: skip


def of_sound(model):
    return row(built, model, **SPOKEN, on=(2, 97), split=(1,), run=lambda m, x: m(x.detach()))


def continued(model, x: Tensor, y: Tensor) -> list[Tensor]:
    """Both parts, the second one with the keys and values of the first one."""
    first = model(inputs_embeds=x, use_cache=True)
    cache = first.past_key_values
    second = model(inputs_embeds=y, past_key_values=cache, use_cache=True)
    return [first.last_hidden_state, second.last_hidden_state]


def one_by_one(model, x: Tensor, y: Tensor) -> list[Tensor]:
    """A prompt, and then single steps, which no rank splits."""
    cache = model(inputs_embeds=x, use_cache=True).past_key_values
    found = []
    for step in range(2):
        token = torch.full((2, 1, 16), 0.1 * step + 0.05, dtype=x.dtype) + y.mean(1, keepdim=True)
        found.append(model(inputs_embeds=token, past_key_values=cache, use_cache=True)[0])
    return found


def cached(model, *, run=continued, within=FLOAT32, **options):
    """The first input is what is read at first, the second what comes after it."""
    parts = [EMBEDDED, (2, 3, 16)]
    return row(built, model, **options, on=parts, split=(1,), within=within, run=run)


CASES = {
    "t5": of_embeddings(tf.T5EncoderModel, **T5, within=FLOAT32),
    "t5_loss": of_embeddings(tf.T5ForConditionalGeneration, **T5, within=FLOAT32,
        call={"labels": FIVE_LABELS}),
    "t5_ids": of_labels(tf.T5ForConditionalGeneration, **T5, within=FLOAT32),
    "bert": of_ids(tf.BertModel, **TEXT),
    "bert_embeds": of_embeddings(tf.BertModel, **TEXT),
    "bert_eager": of_embeddings(tf.BertModel, **TEXT, attn_implementation="eager"),
    "bert_mask": of_embeddings(tf.BertModel, **TEXT, call={"attention_mask": KEPT}),
    "bert_mlm": of_labels(tf.BertForMaskedLM, **TEXT),
    "roberta": of_ids(tf.RobertaModel, **TEXT),
    "distilbert": of_ids(tf.DistilBertModel, **WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=32),
    "electra": of_ids(tf.ElectraModel, **TEXT, embedding_size=8),
    "deberta_v2": of_ids(tf.DebertaV2Model, **TEXT, relative_attention=True,
        pos_att_type=["p2c", "c2p"]),
    "modernbert": of_ids(tf.ModernBertModel, **TEXT, pad_token_id=0, within=FLOAT32),
    "gpt2": of_ids(tf.GPT2Model, **GPT2, call=WITHOUT_CACHE),
    "gpt2_lm": of_labels(tf.GPT2LMHeadModel, **GPT2),
    "gpt2_embeds": of_embeddings(tf.GPT2Model, **GPT2, call=WITHOUT_CACHE),
    "gpt_neox": of_ids(tf.GPTNeoXModel, **TEXT, within=FLOAT32),
    "opt": of_ids(tf.OPTModel, **TEXT, ffn_dim=32, word_embed_proj_dim=16),
    "bloom": of_ids(tf.BloomModel, **WORDS, hidden_size=16, n_layer=1, n_head=2, within=FLOAT32),
    "bart": of_labels(tf.BartForConditionalGeneration, **CODERS, max_position_embeddings=32),
    "llama": of_ids(tf.LlamaModel, **ROPE, within=FLOAT32),
    "llama_lm": of_labels(tf.LlamaForCausalLM, **ROPE, within=FLOAT32),
    "mistral": of_ids(tf.MistralModel, **ROPE, sliding_window=4, within=FLOAT32),
    "qwen2": of_ids(tf.Qwen2Model, **ROPE, within=FLOAT32),
    "qwen3": of_ids(tf.Qwen3Model, **ROPE, head_dim=8, within=FLOAT32),
    "gemma2": of_ids(tf.Gemma2Model, **ROPE, head_dim=8, within=FLOAT32),
    "mixtral": of_ids(tf.MixtralModel, **ROPE, num_local_experts=2, experts_implementation="eager",
        within=FLOAT32),
    "mamba": of_ids(tf.MambaModel, **WORDS, **SIZE, within=FLOAT32),
    "longformer": of_ids(tf.LongformerModel, **TEXT, attention_window=4, pad_token_id=1),
    "big_bird": of_ids(tf.BigBirdModel, **TEXT, attention_type="original_full"),
    "fnet": of_ids(tf.FNetModel, **TEXT, use_tpu_fourier_optimizations=False),
    "xlnet": of_ids(tf.XLNetModel, **WORDS, **WIDTH, n_layer=1, n_head=2, d_inner=32),
    "perceiver": of("inputs", EMBEDDED)(tf.PerceiverModel, **WORDS, **WIDTH, num_latents=4,
        d_latents=16, num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=2,
        num_cross_attention_heads=2, max_position_embeddings=11),
    "whisper": of("input_features", (2, 8, 40), axis=2)(tf.WhisperForConditionalGeneration,
        **CODERS, num_mel_bins=8, max_source_positions=20, decoder_start_token_id=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, call={"labels": FIVE_LABELS}),
    "wav2vec2": of_sound(tf.Wav2Vec2Model),
    "hubert": of_sound(tf.HubertModel),
    "patchtst": of("past_values", (2, 32, 2))(tf.PatchTSTForPrediction, **WIDTH,
        num_input_channels=2, context_length=32, patch_length=4, patch_stride=4,
        prediction_length=4, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32),
    "encodec": of("input_values", (1, 1, 64), axis=2)(tf.EncodecModel, audio_channels=1,
        num_filters=4, hidden_size=8, codebook_size=8, codebook_dim=8, num_lstm_layers=1,
        upsampling_ratios=[2, 2]),
    "mamba2": of_ids(tf.Mamba2Model, **WORDS, **SIZE, **SSM, num_heads=4, head_dim=8,
        within=FLOAT32),
    "falcon_mamba": of_ids(tf.FalconMambaModel, **WORDS, **SIZE, state_size=4, within=FLOAT32),
    "rwkv": of_ids(tf.RwkvModel, **WORDS, **SIZE, context_length=32, within=FLOAT32),
    "recurrent_gemma": of_ids(tf.RecurrentGemmaModel, **TEXT | {"num_hidden_layers": 3},
        lru_width=16, attention_window_size=6, head_dim=8, within=FLOAT32, call=WITHOUT_CACHE),
    "lfm2": of_ids(tf.Lfm2Model, **ROPE, layer_types=["conv", "full_attention"], within=FLOAT32,
        call=WITHOUT_CACHE),
    "gpt2_cache": cached(tf.GPT2Model, **GPT2, within=1e-10),
    "gpt2_steps": cached(tf.GPT2Model, **GPT2, run=one_by_one, within=1e-10),
    "llama_cache": cached(tf.LlamaModel, **ROPE),
    "llama_steps": cached(tf.LlamaModel, **ROPE, run=one_by_one),
    "mistral_window_cache": cached(tf.MistralModel, **ROPE, sliding_window=4),
    "qwen3_cache": cached(tf.Qwen3Model, **ROPE, head_dim=8),
}  # fmt: skip
