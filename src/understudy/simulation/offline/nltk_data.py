"""Data of nltk that is not here: texts are split at spaces and full stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.simulation.libraries import when_imported
from understudy.simulation.offline.switch import is_made_up
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]


@when_imported("nltk.data", "find")
@when_imported("nltk", "download")
def find_missing_words(original: Function) -> Function:
    """With `--offline-data`, missing data is no error: it is made up."""

    def find(resource_name: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_made_up():
            return original(resource_name, *args, **kwargs)
        try:
            return original(resource_name, *args, **kwargs)
        except (LookupError, OSError):
            add_note(f"nltk {resource_name!r}: not on this machine; texts are split at spaces and full stops")
            return str(resource_name)

    return find


@when_imported("nltk.tokenize", "sent_tokenize", "word_tokenize")
@when_imported("nltk", "sent_tokenize", "word_tokenize")
def split_without_data(original: Function) -> Function:
    """Sentences end at full stops, words at spaces."""

    def split(text: str, *args: Any, **kwargs: Any) -> list[str]:
        try:
            return original(text, *args, **kwargs)
        except (LookupError, OSError):
            if not is_made_up():
                raise
            mark = ". " if original.__name__ == "sent_tokenize" else None
            return [part for part in text.split(mark) if part]

    return split
