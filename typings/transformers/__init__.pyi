# The names that lightning_modules uses: of all of them pyright binds 400 models, for 10 s.
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.t5.configuration_t5 import T5Config as T5Config
from transformers.models.t5.modeling_t5 import (
    T5ForConditionalGeneration as T5ForConditionalGeneration,
)
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)
