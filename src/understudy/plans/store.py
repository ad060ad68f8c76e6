"""Results by content, in a folder: what was rehearsed once is not rehearsed again.

    store = ResultStore(find_folder(None))
    key = make_key({"arguments": […], "card": …, "sources": {…}})
    store.read(key)                      None, or the record
    store.write(key, record, reads)      `reads`: files of which the record holds as long as they stay as they are

A record is JSON, written whole or not at all. A file that can't be read is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError

FORMAT = 1
MOST_ENTRIES = 8
"""The most entries of one key, for different contents of its input files."""


def find_folder(given: str | None) -> Path:
    if given is not None:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "understudy" / "plans"


def make_key(parts: Mapping[str, Any]) -> str:
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: str) -> str:
    """ "" for a file that is not there."""
    try:
        with open(path, "rb") as file:
            return (
                hashlib.file_digest(file, "sha256").hexdigest()
                if hasattr(hashlib, "file_digest")
                else _hash(file)
            )
    except OSError:
        return ""


def _hash(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@dataclass
class ResultStore:
    """`folder` is None where nothing is kept."""

    folder: Path | None

    def read(self, key: str) -> dict[str, Any] | None:
        for entry in self._read_entries(key):
            reads = entry.get("reads", {})
            if isinstance(reads, dict) and all(hash_file(path) == digest for path, digest in reads.items()):
                record = entry.get("record")
                return record if isinstance(record, dict) else None
        return None

    def write(self, key: str, record: dict[str, Any], reads: Iterable[str] = ()) -> None:
        if self.folder is None:
            return
        entry = {"reads": {path: hash_file(path) for path in reads}, "record": record}
        entries = [entry, *(e for e in self._read_entries(key) if e.get("reads") != entry["reads"])]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as file:
                json.dump(entries[:MOST_ENTRIES], file)
            os.replace(file.name, self.folder / f"{key}.json")
        except OSError as error:
            raise UnderstudyError(
                f"results can't be kept in {self.folder}: {error.strerror or error}; give another --cache"
            ) from None

    def _read_entries(self, key: str) -> list[dict[str, Any]]:
        if self.folder is None:
            return []
        try:
            entries = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
