"""transformers: text, sound and time series, split along the sequence, of small configurations."""

import torch
import transformers as tf
from transformers.models.bloom.modeling_bloom import GeLUFunction

import lightning_shard
from benchmarks.model_zoo import Apply, Case

lightning_shard.allow_function(GeLUFunction)  # without this line bloom is refused

BASE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
FLOAT32 = 1e-5  # norms, softmax or rotations are computed in float32


def ids(length=11, vocabulary=32):
    return lambda: torch.randint(3, vocabulary, (2, length))


def of_ids(model, config, tolerance=1e-10, **arguments):
    return Case(
        lambda: Apply(lambda m, x: m(input_ids=x, **arguments), model(config())), [ids()], (1,),
        tolerance,
    )  # fmt: skip


def of_embeddings(model, config, tolerance=1e-10, **arguments):
    return Case(
        lambda: Apply(lambda m, x: m(inputs_embeds=x, **arguments), model(config())), [(2, 11, 16)],
        (1,), tolerance,
    )  # fmt: skip


def of_labels(model, config, tolerance=1e-10):
    return Case(
        lambda: Apply(lambda m, x: m(input_ids=x, labels=x), model(config())), [ids()], (1,),
        tolerance,
    )  # fmt: skip


def conf(kind, **options):
    base = BASE | {"vocab_size": 32} | options
    return lambda: kind(**{k: v for k, v in base.items() if v is not ...})


def t5():
    return tf.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip


def gpt2():
    return tf.GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2)


def bart():
    return tf.BartConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=32,
    )  # fmt: skip


def whisper():
    return tf.WhisperConfig(
        vocab_size=32, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=20, decoder_start_token_id=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def wav2vec2(kind):
    return kind(
        vocab_size=32, **BASE, conv_dim=[8, 8], conv_stride=[2, 2], conv_kernel=[3, 3],
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip


def perceiver():
    return tf.PerceiverConfig(
        num_latents=4, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=1,
        num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=32,
        max_position_embeddings=11,
    )  # fmt: skip


def rope(kind, **options):
    return conf(kind, num_key_value_heads=1, max_position_embeddings=32, **options)


EAGER = {"attn_implementation": "eager"}


CASES = {
    "t5": of_embeddings(tf.T5EncoderModel, t5, FLOAT32),
    "t5_loss": Case(lambda: Apply(lambda m,
        x: m(inputs_embeds=x, labels=torch.arange(10).reshape(2, 5)),
        tf.T5ForConditionalGeneration(t5())), [(2, 11, 16)], (1,), FLOAT32),
    "t5_ids": Case(lambda: Apply(lambda m, x: m(input_ids=x, labels=x),
        tf.T5ForConditionalGeneration(t5())), [ids()], (1,), FLOAT32),
    "bert": of_ids(tf.BertModel, conf(tf.BertConfig)),
    "bert_embeds": of_embeddings(tf.BertModel, conf(tf.BertConfig)),
    "bert_eager": of_embeddings(tf.BertModel, conf(tf.BertConfig, **EAGER)),
    "bert_mask": Case(lambda: Apply(lambda m, x: m(inputs_embeds=x,
        attention_mask=torch.arange(11).expand(2, 11) < torch.tensor([[11], [7]])),
        tf.BertModel(conf(tf.BertConfig)())), [(2, 11, 16)], (1,)),
    "bert_mlm": of_labels(tf.BertForMaskedLM, conf(tf.BertConfig)),
    "roberta": of_ids(tf.RobertaModel, conf(tf.RobertaConfig)),
    "distilbert": of_ids(tf.DistilBertModel,
        lambda: tf.DistilBertConfig(vocab_size=32, dim=16, n_layers=2, n_heads=2, hidden_dim=32)),
    "electra": of_ids(tf.ElectraModel, conf(tf.ElectraConfig, embedding_size=8)),
    "deberta_v2": of_ids(tf.DebertaV2Model, conf(tf.DebertaV2Config, relative_attention=True,
        pos_att_type=["p2c", "c2p"])),
    "modernbert": of_ids(tf.ModernBertModel, conf(tf.ModernBertConfig, pad_token_id=0), FLOAT32),
    "gpt2": of_ids(tf.GPT2Model, gpt2, use_cache=False),
    "gpt2_lm": of_labels(tf.GPT2LMHeadModel, gpt2),
    "gpt2_embeds": of_embeddings(tf.GPT2Model, gpt2, use_cache=False),
    "gpt_neox": of_ids(tf.GPTNeoXModel, conf(tf.GPTNeoXConfig), FLOAT32),
    "opt": of_ids(tf.OPTModel, conf(tf.OPTConfig, ffn_dim=32, word_embed_proj_dim=16)),
    "bloom": of_ids(tf.BloomModel,
        lambda: tf.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2), FLOAT32),
    "bart": of_labels(tf.BartForConditionalGeneration, bart),
    "llama": of_ids(tf.LlamaModel, rope(tf.LlamaConfig), FLOAT32),
    "llama_lm": of_labels(tf.LlamaForCausalLM, rope(tf.LlamaConfig), FLOAT32),
    "mistral": of_ids(tf.MistralModel, rope(tf.MistralConfig, sliding_window=4), FLOAT32),
    "qwen2": of_ids(tf.Qwen2Model, rope(tf.Qwen2Config), FLOAT32),
    "qwen3": of_ids(tf.Qwen3Model, rope(tf.Qwen3Config, head_dim=8), FLOAT32),
    "gemma2": of_ids(tf.Gemma2Model, rope(tf.Gemma2Config, head_dim=8), FLOAT32),
    "mixtral": of_ids(tf.MixtralModel, rope(tf.MixtralConfig, num_local_experts=2,
        experts_implementation="eager"), FLOAT32),
    "mamba": of_ids(tf.MambaModel,
        conf(tf.MambaConfig, num_attention_heads=..., intermediate_size=...), FLOAT32),
    "longformer": of_ids(tf.LongformerModel,
        conf(tf.LongformerConfig, attention_window=4, pad_token_id=1)),
    "big_bird": of_ids(tf.BigBirdModel, conf(tf.BigBirdConfig, attention_type="original_full")),
    "fnet": of_ids(tf.FNetModel, conf(tf.FNetConfig, use_tpu_fourier_optimizations=False)),
    "xlnet": of_ids(tf.XLNetModel,
        lambda: tf.XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=32)),
    "perceiver": Case(lambda: Apply(lambda m, x: m(inputs=x), tf.PerceiverModel(perceiver())),
        [(2, 11, 16)], (1,)),
    "whisper": Case(lambda: Apply(lambda m,
        x: m(input_features=x, labels=torch.arange(10).reshape(2, 5)),
        tf.WhisperForConditionalGeneration(whisper())), [(2, 8, 40)], (2,)),
    "wav2vec2": Case(lambda: Apply(lambda m, x: m(x.detach()),
        tf.Wav2Vec2Model(wav2vec2(tf.Wav2Vec2Config))), [(2, 97)], (1,)),
    "hubert": Case(lambda: Apply(lambda m, x: m(x.detach()),
        tf.HubertModel(wav2vec2(tf.HubertConfig))), [(2, 97)], (1,)),
    "patchtst": Case(lambda: Apply(lambda m, x: m(past_values=x),
        tf.PatchTSTForPrediction(tf.PatchTSTConfig(num_input_channels=2, context_length=32,
        patch_length=4, patch_stride=4, prediction_length=4, d_model=16, num_hidden_layers=1,
        num_attention_heads=2, ffn_dim=32))), [(2, 32, 2)], (1,)),
    "encodec": Case(lambda: Apply(lambda m, x: m(x),
        tf.EncodecModel(tf.EncodecConfig(audio_channels=1, num_filters=4, hidden_size=8,
        codebook_size=8, codebook_dim=8, num_lstm_layers=1, upsampling_ratios=[2, 2]))),
        [(1, 1, 64)], (2,)),
}  # fmt: skip
