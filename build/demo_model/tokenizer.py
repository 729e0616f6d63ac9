"""The demo model's tokenizer: byte-level BPE over Python text, with a chat template, in HuggingFace's files.

Byte level means any string survives a round trip, whatever its script. A line break and the indentation after it
are one pre-token, so a nesting level costs one token rather than one per space.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY_TOKENS = 4096
MAX_POSITION_TOKENS = 1024

END_OF_TEXT = "<|endoftext|>"  # begins every document and ends it: bos and eos
PAD = "<|pad|>"
SYSTEM, USER, ASSISTANT, END_OF_TURN = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT, END_OF_TURN)  # ids 0..5, in this order
NAMED_TOKENS = {
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "pad_token": PAD,
    "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END_OF_TURN],
}

PRE_TOKENS = "|".join(
    (
        r"[\r\n]+[ \t]*",  # line breaks with the indentation that follows
        r" ?[\p{L}\p{M}]+",  # a word; marks belong to their letters in many scripts
        r" ?\p{N}{1,3}",
        r" ?[^\s\p{L}\p{M}\p{N}]+",  # operators and punctuation
        r"\s+(?=\S)|\s+",
    )
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' ~ message['role'] ~ ': allowed are system, user, assistant') }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' }}{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary_tokens: int = VOCABULARY_TOKENS) -> Tokenizer:
    """Learn merges from `texts`. The result prepends <|endoftext|> if it is to add special tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_tokens,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begins = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begins])
    return tokenizer


def tokenizer_config() -> dict:
    """What `AutoTokenizer` reads next to tokenizer.json."""
    plain = ("lstrip", "normalized", "rstrip", "single_word")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **NAMED_TOKENS,
        "added_tokens_decoder": {
            str(token_id): {"content": token, **dict.fromkeys(plain, False), "special": True}
            for token_id, token in enumerate(SPECIAL_TOKENS)
        },
        "model_max_length": MAX_POSITION_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config() -> dict:
    """Generation ends with the document or with the assistant's turn, whichever comes first."""
    bos, pad, end = (SPECIAL_TOKENS.index(token) for token in (END_OF_TEXT, PAD, END_OF_TURN))
    return {"bos_token_id": bos, "eos_token_id": [bos, end], "pad_token_id": pad}


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "special_tokens_map.json", NAMED_TOKENS)
    write_json(folder / "generation_config.json", generation_config())
