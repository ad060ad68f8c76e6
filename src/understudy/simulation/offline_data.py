"""Data sets and tokenizers that are not here: what is wanted is said, or, with `--offline-data`, made up.

A rehearsal downloads nothing. What it needs of a data set are its columns, and rows that are as long as real ones; of a
tokenizer, that long texts fill the length that the script cuts them to. Both are made up here for the data sets that
scripts usually name; the report says for which.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from understudy import _torch
from understudy.contexts import contextmanager
from understudy.simulation.libraries import MissingFileError, add_note, when_imported

Function = Callable[..., Any]
ROWS = 512
"""Of each split."""
WORDS = "a long time ago in a land of rivers and hills there was a small house by the sea where people met to talk and "
TEXT = WORDS * 60
SENTENCE = WORDS * 2
"""Texts are long, and are cut by those who tokenise them: that is when most memory is needed."""

_makes_data: list[bool] = []


@contextmanager
def make_missing_data(is_wanted: bool) -> Iterator[None]:
    """Inside, data sets and tokenizers that are not here are made up; or else they are errors."""
    _makes_data.append(is_wanted)
    try:
        yield
    finally:
        _makes_data.pop()


def _is_made_up() -> bool:
    return bool(_makes_data) and _makes_data[-1]


# --- data sets -------------------------------------------------------------------------------------------------------

Row = Callable[[int], dict[str, Any]]


def _make_image(number: int, width: int, height: int, mode: str = "RGB") -> Any:
    return importlib.import_module("PIL.Image").new(mode, (width, height), number % 256)


KINDS: tuple[tuple[tuple[str, ...], Row, dict[str, int]], ...] = (
    (("cifar",), lambda i: {"img": _make_image(i, 32, 32), "label": i % 10}, {"label": 10}),
    (("mnist",), lambda i: {"image": _make_image(i, 28, 28, "L"), "label": i % 10}, {"label": 10}),
    (("imagenet", "ilsvrc"), lambda i: {"image": _make_image(i, 500, 375), "label": i % 1000}, {"label": 1000}),
    (("food101", "beans", "flowers"), lambda i: {"image": _make_image(i, 512, 512), "label": i % 3}, {"label": 101}),
    (("squad",), lambda i: {
        "id": str(i), "title": WORDS, "context": TEXT, "question": SENTENCE,
        "answers": {"text": [WORDS[2:11]], "answer_start": [2]}}, {}),
    (("sst2", "cola"), lambda i: {"sentence": SENTENCE, "label": i % 2, "idx": i}, {"label": 2}),
    (("mrpc", "glue", "stsb", "rte"), lambda i: {
        "sentence1": SENTENCE, "sentence2": SENTENCE, "label": i % 2, "idx": i}, {"label": 2}),
    (("alpaca", "dolly", "instruct"), lambda i: {"instruction": SENTENCE, "input": TEXT, "output": TEXT}, {}),
    (("ultrachat", "robots", "oasst", "chat"), lambda i: {
        "prompt": SENTENCE,
        "messages": [{"role": "user", "content": SENTENCE}, {"role": "assistant", "content": TEXT}]}, {}),
    (("wmt", "opus"), lambda i: {"translation": {"en": SENTENCE, "de": SENTENCE, "fr": SENTENCE}}, {}),
    (("cnn_dailymail",), lambda i: {"article": TEXT, "highlights": SENTENCE, "id": str(i)}, {}),
    (("xsum",), lambda i: {"document": TEXT, "summary": SENTENCE, "id": str(i)}, {}),
    (("ag_news",), lambda i: {"text": TEXT, "label": i % 4}, {"label": 4}),
    (("imdb", "yelp", "rotten_tomatoes", "sentiment"), lambda i: {"text": TEXT, "label": i % 2}, {"label": 2}),
)  # fmt: skip
"""Parts of names, a row, and how many classes a column has. Other names have a column of texts."""


def _find_kind(name: str) -> tuple[Row, dict[str, int]]:
    for parts, row, classes in KINDS:
        if any(part in name.lower() for part in parts):
            return row, classes
    return (lambda i: {"text": TEXT}), {}


@when_imported("datasets.load", "load_dataset")
@when_imported("datasets", "load_dataset")
def find_missing_data(original: Function) -> Function:
    """A data set that is not here is named in the error, or made up."""

    def load_dataset(path: object, *args: object, **kwargs: Any) -> Any:
        try:
            return original(path, *args, **kwargs)
        except OSError as error:
            if _torch.active_fake_mode() is None or isinstance(error, MissingFileError):
                raise
            name = "/".join(str(part) for part in (path, *args[:1], *([kwargs["name"]] if kwargs.get("name") else [])))
            if _is_made_up():
                return _make_data(name, kwargs.get("split"), bool(kwargs.get("streaming")))
            raise MissingFileError(
                f"load_dataset({str(path)!r}): the data set is not here, and a rehearsal downloads nothing. A few rows are "
                "enough: fetch it once, or name a local file with the same columns; --offline-data makes up rows"
            ) from error

    return load_dataset


def _make_data(name: str, split: Any, is_streamed: bool) -> Any:
    datasets: Any = importlib.import_module("datasets")
    row, classes = _find_kind(name)
    rows = [row(i) for i in range(ROWS)]
    columns = {column: [entry[column] for entry in rows] for column in rows[0]}
    made = datasets.Dataset.from_dict(columns)
    for column, count in classes.items():
        made = made.cast_column(column, datasets.ClassLabel(num_classes=count))
    add_note(f"load_dataset({name!r}): not here; {ROWS} rows were made up, with the columns {', '.join(columns)}")
    if split is not None:
        return made.to_iterable_dataset() if is_streamed else made
    splits = {part: made.to_iterable_dataset() if is_streamed else made for part in ("train", "validation", "test")}
    return datasets.IterableDatasetDict(splits) if is_streamed else datasets.DatasetDict(splits)


# --- tokenizers ------------------------------------------------------------------------------------------------------


@when_imported("transformers.models.auto.tokenization_auto", "AutoTokenizer.from_pretrained")
@when_imported("transformers.tokenization_utils_base", "PreTrainedTokenizerBase.from_pretrained")
def find_missing_tokenizers(original: Function) -> Any:
    """A tokenizer that is not here is named in the error, or made up."""
    plain = getattr(original, "__func__", original)

    def from_pretrained(cls: object, name: object, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(cls, name, *args, **kwargs)
        except (OSError, ValueError, AttributeError) as error:
            # Without its files, some tokenizers fail on what they would have read.
            if _torch.active_fake_mode() is None or not _is_made_up():
                raise
            if isinstance(error, (ValueError, AttributeError)) and _is_folder_with_tokenizer(name):
                raise
            return _make_tokenizer(str(name))

    return classmethod(from_pretrained)


def _is_folder_with_tokenizer(name: Any) -> bool:
    return any(os.path.isfile(os.path.join(str(name), file)) for file in ("tokenizer.json", "tokenizer_config.json"))


SPECIAL = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    "cls_token": "<cls>", "sep_token": "<sep>",
}  # fmt: skip


def _make_tokenizer(name: str) -> Any:
    """One that takes words apart at spaces. Its numbers are below 100: every vocabulary has them."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys((*SPECIAL.values(), *WORDS.split())))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    add_note(f"the tokenizer of {name!r}: not here; one that takes texts apart at spaces was made up")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=1024,
        chat_template="{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}",
        **SPECIAL,
    )
