"""One row of a made-up data set, from the descriptions of its columns in `data_sets.toml`.

text, sentence, word         strings: as long as a page, a line, a word
int N, float LOW HIGH        numbers
class A, B, C                a label by name; `class 1000` has that many
image WIDTH HEIGHT [MODE]    a picture of PIL
audio SECONDS RATE           a file of silence, as `datasets.Audio` stores it
boxes A, B                   a few objects in a picture: their boxes and categories
messages, prompt             conversations: a list of messages with roles
turns                        a conversation with the keys of ShareGPT: `from`, `value`
words, tags A, B             equally long lists of words, and of labels
answers, translation A, B    as SQuAD and WMT have them
ones N                       a list: numbers of tokens, or their mask
list KIND                    several of a kind
"""

from __future__ import annotations

import importlib
from typing import Any

WORDS = "a long time ago in a land of rivers and hills there was a small house by the sea where people met to talk and "
TEXT = WORDS * 60
SENTENCE = WORDS * 2
REPLY = WORDS * 36
"""Texts are long, and truncated by tokenizers: the most memory is needed for texts of full length. A conversation has less
than 1,024 words, because some trainers do not cut it."""
LENGTH = 24
"""Length of lists of words."""
BOXES = 7
"""Objects in a picture: as many as those of COCO have on average."""


def make_value(kind: str, number: int) -> Any:
    """The value of a column in row `number`."""
    name, _, rest = kind.partition(" ")
    match name:
        case "text":
            return TEXT
        case "sentence":
            return SENTENCE
        case "word":
            return f"word{number}"
        case "int":
            return number % int(rest or 1_000_000)
        case "float":
            low, high = (float(part) for part in rest.split())
            return low + (high - low) * (number % 11) / 10
        case "class":
            return number % len(labels_of(kind) or ())
        case "image":
            return make_image(number, *rest.split())
        case "audio":
            return make_sound_file(int(rest.split()[0]))
        case "messages":
            return [{"role": "user", "content": SENTENCE}, {"role": "assistant", "content": REPLY}]
        case "turns":
            return [{"from": "human", "value": SENTENCE}, {"from": "gpt", "value": REPLY}]
        case "prompt":
            return [{"role": "user", "content": SENTENCE}]
        case "answer":
            return [{"role": "assistant", "content": REPLY}]
        case "boxes":
            return {
                "id": list(range(BOXES)),
                "area": [100 * 80] * BOXES,
                "bbox": [[10.0 * i, 20.0, 100.0, 80.0] for i in range(BOXES)],
                "category": [i % len(labels_of(kind) or ()) for i in range(BOXES)],
            }
        case "words":
            return WORDS.split()[:LENGTH]
        case "tags":
            return [i % len(labels_of(kind) or ()) for i in range(min(LENGTH, len(WORDS.split())))]
        case "answers":
            return {"text": [WORDS[2:11]], "answer_start": [2]}
        case "translation":
            return dict.fromkeys(split_names(rest), SENTENCE)
        case "ones":
            return [1] * int(rest)
        case "list":
            return [make_value(rest, number + i) for i in range(4)]
        case "bool":
            return number % 2 == 0
        case _:
            raise ValueError(f"unknown kind of column {kind!r}")


def cast_made_up(made: Any, column: str, kind: str) -> Any:
    """The made-up data set with the feature of this column: audio, and labels with names."""
    datasets: Any = importlib.import_module("datasets")
    feature: Any = None
    labels = labels_of(kind)
    if kind.startswith("audio"):
        feature = datasets.Audio(sampling_rate=int(kind.rpartition(" ")[2]))
    elif labels is not None:
        feature = datasets.ClassLabel(names=list(labels))
        if kind.startswith("boxes"):
            feature = {**made.features[column], "category": datasets.Sequence(feature)}
        elif kind.startswith("tags"):
            feature = datasets.Sequence(feature)
    if feature is None:
        return made
    is_quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return made.cast_column(column, feature)
    finally:
        if not is_quiet:
            datasets.enable_progress_bars()


def labels_of(kind: str) -> tuple[str, ...] | None:
    """The names of a column of classes, tags or boxes; None for other columns."""
    name, _, rest = kind.partition(" ")
    if name not in ("class", "tags", "boxes"):
        return None
    return tuple(f"class {i}" for i in range(int(rest))) if rest.isdigit() else split_names(rest)


def split_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def make_image(number: int, width: str = "224", height: str = "224", mode: str = "RGB") -> Any:
    return importlib.import_module("PIL.Image").new(mode, (int(width), int(height)), int(number) % 256)


RATE = 16_000
"""Samples of sound in a second."""


SILENCE = b"made-up silence, seconds: "


def make_sound_file(seconds: int) -> dict[str, Any]:
    """What `datasets.Audio` stores of a file."""
    return {"bytes": SILENCE + str(seconds).encode(), "path": None}


def find_seconds(file: Any) -> int | None:
    """The length of a made-up file; None for others."""
    content = file.get("bytes") if isinstance(file, dict) else None
    if not isinstance(content, bytes) or not content.startswith(SILENCE):
        return None
    return int(content[len(SILENCE) :])


def make_audio(seconds: int, rate: int = RATE) -> dict[str, Any]:
    """What `datasets.Audio` gives to programs."""
    numpy: Any = importlib.import_module("numpy")
    return {"path": None, "array": numpy.zeros(seconds * rate, dtype="float32"), "sampling_rate": rate}
