"""Build the BERT that classifies reviews: pretrained from a folder, or small and untrained."""

import json
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, logging

from common.launch import UserError

from .data import ID2LABEL, refuse_lfs_pointer

BertAndTokenizer = tuple[BertForSequenceClassification, BertTokenizer]
LABELS: Any = {"id2label": ID2LABEL, "label2id": {name: label for label, name in ID2LABEL.items()}}
# Words longer than this become [UNK]. The default is 100, but a whole Thai sentence is one word.
LONGEST_WORD = 1_000_000
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

logging.disable_progress_bar()


def build(model: str, texts: Sequence[str], max_length: int) -> BertAndTokenizer:
    """Return a pretrained BERT from a folder, or a small untrained one, on the CPU."""
    if model == "small":
        return small(texts, max_length)
    return pretrained(Path(model).expanduser(), max_length)


def pretrained(folder: Path, max_length: int, new_head: bool = True) -> BertAndTokenizer:
    """Load a BERT from a local folder, without network access and without executing code.

    The model must accept `max_length` tokens. If `new_head` is True, a classifier that is missing
    or has other classes is initialized with random weights.
    """
    logging.set_verbosity_error()  # no warnings about missing weights; they are checked below
    files = {path.name: path for path in folder.glob("*") if path.is_file()}
    needs = f"--model {folder} must contain config.json, weights, and vocab.txt or tokenizer.json"
    if not files.keys() & {"vocab.txt", "tokenizer.json"}:
        raise UserError(f"{needs} of a BERT model")
    for path in (path for path in files.values() if path.suffix in (".txt", ".json")):
        refuse_lfs_pointer(path)
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type", "bert")
        if kind != "bert":  # models from 2018 and 2019 lack this key
            raise UserError(f"--model {folder} contains a {kind} model; use a BERT model")
        config = BertConfig.from_pretrained(folder, **(LABELS if new_head else {}))
        tokenizer = BertTokenizer.from_pretrained(folder)
        tokenizer.backend_tokenizer.model.max_input_chars_per_word = LONGEST_WORD
        found: Any = BertForSequenceClassification.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,  # even if the file has float16; training in float16 diverges
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, EOFError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        for path in files.values():  # the weights may be git-lfs pointers
            refuse_lfs_pointer(path)
        raise UserError(f"{needs}; a file is missing or damaged ({type(error).__name__})") from None
    loaded, info = found
    missing = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
    head = ("classifier.", "bert.pooler.") if new_head else ()
    if missing := [name for name in missing if not name.startswith(head)]:
        raise UserError(f"--model {folder} has no weights for {min(missing)}; use a full model")
    if any(parameter.isnan().any() for parameter in loaded.parameters()):
        raise UserError(f"--model {folder} contains NaN; use weights from an earlier step")
    rows, positions = config.vocab_size, config.max_position_embeddings
    if max_length > positions:
        text = f"--max-length {max_length} exceeds the {positions} positions of {folder}"
        raise UserError(f"{text}; use at most {positions}")
    if len(tokenizer) > rows:  # fewer tokens are fine: embeddings may be padded
        text = f"the vocabulary of --model {folder} has {len(tokenizer)} tokens"
        raise UserError(f"{text}, but the model has embeddings for {rows}; use its own vocabulary")
    # `loaded` would be saved with the parameter names from its file, such as LayerNorm.gamma. The
    # Trainer would not find these names when it loads the best model.
    model = BertForSequenceClassification(config)
    model.load_state_dict(loaded.state_dict())
    return model, tokenizer


def small(texts: Sequence[str], max_length: int) -> BertAndTokenizer:
    """Build a BERT with two layers and a vocabulary that contains the texts' characters.

    WordPiece splits a word into its first character and one `##` token for each further character.
    A word with an unknown character becomes [UNK]. The tokenizer's rules define the words: each
    Chinese character is a word, but consecutive Korean syllables, kana or emoji form one word.
    """
    rules = BertTokenizer(strip_accents=False).backend_tokenizer  # otherwise, 한 and が are split
    characters, inside = set[str](), set[str]()
    for text in texts:
        for word, _ in rules.pre_tokenizer.pre_tokenize_str(rules.normalizer.normalize_str(text)):
            characters.update(word)
            inside.update(word if len(word) > 1 else "")
    tokens = SPECIAL_TOKENS + sorted(characters) + [f"##{c}" for c in sorted(inside)]
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = BertTokenizer(numbers, strip_accents=False, model_max_length=max_length)
    tokenizer.backend_tokenizer.model.max_input_chars_per_word = LONGEST_WORD
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=max_length,
        hidden_dropout_prob=0.0,  # drawing dropout masks would take a fifth of each step
        attention_probs_dropout_prob=0.0,
        **LABELS,
    )
    return BertForSequenceClassification(config), tokenizer
