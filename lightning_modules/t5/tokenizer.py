"""A tokenizer with T5's special tokens: trained on texts, or loaded from a folder or the hub."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

PAD, END, UNKNOWN = SPECIAL = ["<pad>", "</s>", "<unk>"]  # ids 0, 1 and 2, as in T5
ALPHABET = 200  # characters; rarer ones are unknown


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Learn byte-pair encoding of lower-cased words, punctuation marks and digits.

    Args:
        texts: The texts to learn from.
        vocab_size: Tokens at most, the special ones included.

    Returns:
        The tokenizer as JSON, for `tokenizer_of`.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, SPECIAL.index(END))]
    )
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        limit_alphabet=ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer from its JSON, as `train_tokenizer` returns it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
    )


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a pretrained model.

    Args:
        name_or_path: A local folder, or the name of a model on the Hugging Face hub.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: There is none of this name.
        ValueError: Its files are damaged.
    """
    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as err:  # a parser raises errors of any class
        missing = isinstance(err, OSError | ValueError)
        if not missing or Path(name_or_path, "tokenizer.json").is_file():
            reason = str(err).partition("\n")[0]
            raise ValueError(
                f"The tokenizer {name_or_path!r} cannot be read ({type(err).__name__}: {reason}): "
                "save it again by `save_pretrained`, or leave out `tokenizer` to train one on the "
                "texts."
            ) from err
        raise FileNotFoundError(
            f"No tokenizer was found at {name_or_path!r}: name a folder that holds one, or a model "
            "of the Hugging Face hub while there is a network, or leave out `tokenizer` to train "
            "one on the texts."
        ) from err
