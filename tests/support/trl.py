"""A tokenizer for tiny models, for TRL's trainers."""

from tests.support import huggingface as hf


def tokenizer():
    """Return one that knows the models' tokens by their numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(i): i for i in range(hf.VOCABULARY)}, unk_token="3")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "0", "bos_token": "1", "eos_token": "2", "unk_token": "3"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
