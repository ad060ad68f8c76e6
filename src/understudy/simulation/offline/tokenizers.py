"""Tokenizers that are not here: an error that names them, or one that splits texts at spaces."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

from understudy import _torch
from understudy.simulation.libraries import MissingFileError, when_imported
from understudy.simulation.offline.columns import WORDS
from understudy.simulation.offline.models import find_configuration, find_vocabulary_size
from understudy.simulation.offline.pipelines import find_part
from understudy.simulation.offline.switch import is_made_up, note_made_up

Function = Callable[..., Any]


@when_imported("transformers.models.auto.tokenization_auto", "AutoTokenizer.from_pretrained")
@when_imported("transformers.tokenization_utils_base", "PreTrainedTokenizerBase.from_pretrained")
def find_missing_tokenizers(original: Function) -> Any:
    """A tokenizer that is not here is named in the error, or made up."""
    plain = getattr(original, "__func__", original)

    def from_pretrained(cls: object, pretrained_model_name_or_path: object, *args: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        try:
            found = plain(cls, name, *args, **kwargs)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            # Without their files, some tokenizers fail in other ways than a missing file.
            if not is_made_up():
                raise
            if not isinstance(error, OSError) and has_tokenizer(name):
                raise
            return make_tokenizer(str(name), kwargs.get("subfolder"))
        if _torch.active_fake_mode() is None or not is_empty(found):
            return found
        if is_made_up():
            return make_tokenizer(str(name), kwargs.get("subfolder"))
        raise MissingFileError(
            f"from_pretrained({str(name)!r}): its tokenizer.json is not on this machine: the tokenizer has no words, and "
            f"every text would be empty; fetch it once with `hf download {name} tokenizer.json`, allow the network with "
            "--online, or let a tokenizer be made up with --offline-data"
        )

    return classmethod(from_pretrained)


def has_tokenizer(name: Any) -> bool:
    files = (
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
    )
    return any(os.path.isfile(os.path.join(str(name), file)) for file in files)


def is_empty(tokenizer: Any) -> bool:
    """Whether it has special tokens only: transformers makes such a tokenizer if there is only a config.json."""
    special = getattr(tokenizer, "all_special_ids", None)
    return special is not None and hasattr(tokenizer, "__len__") and len(tokenizer) <= len(set(special)) + 1


SPECIAL = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    "cls_token": "<cls>", "sep_token": "<sep>",
}  # fmt: skip


MOST_TOKENS = 1024
"""Models for longer texts are trained on shorter ones than they can take."""


def find_model(name: str, folder: object = None) -> dict[str, Any]:
    """The fields of the model, or of the part of a pipeline, that the tokenizer belongs to; empty if it is not known."""
    part = str(folder).replace("tokenizer", "text_encoder") if folder else None
    return (find_part(name, part) if part else find_configuration(name)) or {}


def find_text_length(name: str, folder: object = None) -> int:
    """The number of tokens that the tokenizer of a public model cuts texts to: as many as the model has positions for."""
    found = find_model(name, folder)
    if found.get("model_type") == "clip_text_model":
        return 77
    positions = found.get("max_position_embeddings", POSITIONS.get(found.get("model_type", ""), MOST_TOKENS))
    # The first two positions of these models are those of padding.
    unused = 2 if found.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    return min(positions - unused, MOST_TOKENS)


POSITIONS = {
    "bert": 512, "distilbert": 512, "albert": 512, "electra": 512, "deberta": 512, "deberta-v2": 512, "t5": 512, "mt5": 512,
    "roberta": 514, "xlm-roberta": 514, "mpnet": 514, "clip": 77,
}  # fmt: skip
"""By type of model, where the configuration does not say."""


def list_inputs(name: str) -> list[str]:
    """The models for pairs of sentences take a type for each token, too."""
    model_type = (find_configuration(name) or {}).get("model_type")
    types = ["token_type_ids"] if model_type in ("bert", "albert", "electra", "deberta", "deberta-v2") else []
    return ["input_ids", *types, "attention_mask"]


def make_tokenizer(name: str, folder: object = None) -> Any:
    """A tokenizer that splits texts at spaces. Its numbers are below 100, which every vocabulary has. It has as many
    words as the model has embeddings: programs resize these to `len(tokenizer)`."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys((*SPECIAL.values(), *WORDS.split())))}
    fields = find_model(name, folder) or _read_own_configuration(name)
    size = find_vocabulary_size(fields) if fields else MOST_WORDS
    vocabulary |= {f"<unused{i}>": i for i in range(len(vocabulary), size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    note_made_up(
        name, f"the tokenizer of {name!r}: not on this machine; one that splits texts at spaces was made up"
    )
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=find_text_length(name, folder),
        model_input_names=list_inputs(name),
        name_or_path=name,
        chat_template="{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}",
        **SPECIAL,
    )
    tokenizer.legacy = False  # as those of Llama and T5 have it
    return tokenizer


MOST_WORDS = 32_000
"""The vocabulary of a model that is not known."""


def _read_own_configuration(name: str) -> dict[str, Any]:
    """The config.json of a folder of this machine, whose tokenizer is missing."""
    file = Path(name) / "config.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if "model_type" in found else {}


# --- tiktoken --------------------------------------------------------------------------------------------------------

SIZES = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}


SPECIAL_TOKENS = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endofprompt|>")


def make_encoding(name: str) -> Any:
    """A `tiktoken.Encoding` with as many tokens, which splits texts at spaces."""
    special = SPECIAL_TOKENS[:1] if name in ("gpt2", "r50k_base", "p50k_base") else SPECIAL_TOKENS
    count = SIZES.get(name, 50257) - len(special)
    return make_encoding_class()(
        name,
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([i]) if i < 256 else b" word%d" % i: i for i in range(count)},
        special_tokens={token: count + i for i, token in enumerate(special)},
    )


@functools.cache
def make_encoding_class() -> Any:
    tiktoken: Any = importlib.import_module("tiktoken")

    def encode_ordinary(self: Any, text: str) -> list[int]:
        """A number for each word."""
        return [sum(word.encode()) % 1000 for word in text.split(" ")]

    def encode(
        self: Any,
        text: str,
        *,
        allowed_special: Literal["all"] | Collection[str] = (),
        disallowed_special: Literal["all"] | Collection[str] = "all",
    ) -> list[int]:
        return encode_ordinary(self, text)

    def encode_batch(self: Any, text: list[str], **options: object) -> list[list[int]]:
        return [encode_ordinary(self, part) for part in text]

    methods = {
        "encode_ordinary": encode_ordinary,
        "encode": encode,
        "encode_batch": encode_batch,
        "encode_ordinary_batch": encode_batch,
    }
    return type("MadeUpEncoding", (tiktoken.Encoding,), methods)


@when_imported("tiktoken", "get_encoding", "encoding_for_model")
def find_missing_encodings(original: Function) -> Function:
    """An encoding that is not here is named in the error, or made up."""

    def get_encoding(name: str) -> Any:
        try:
            return original(name)
        except OSError as error:
            if is_made_up():
                note_made_up(
                    name, f"tiktoken {name!r}: not on this machine; a token for each word was made up"
                )
                return make_encoding(name)
            if _torch.active_fake_mode() is None:
                raise
            raise MissingFileError(
                f"tiktoken.get_encoding({name!r}): its file is not in the cache, and a rehearsal downloads nothing; put it "
                "there, allow the network with --online, or let tokens be made up with --offline-data"
            ) from error

    return get_encoding
