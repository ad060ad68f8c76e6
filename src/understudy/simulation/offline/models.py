"""Configurations of public models that are not on this machine, from `models.toml`."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from understudy.simulation.catalogue import read_toml
from understudy.simulation.libraries import when_imported
from understudy.simulation.offline.pipelines import find_part
from understudy.simulation.offline.switch import is_made_up
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]
TABLE = Path(__file__).with_name("models.toml")
ENDINGS = ("-instruct", "-it", "-chat", "-base", "-hf")
"""Endings of names of models that were trained further, and have the same shapes."""

HUB_OPTIONS = frozenset(
    "cache_dir force_download proxies token local_files_only revision trust_remote_code subfolder _from_pipeline _from_auto "
    "_commit_hash gguf_file user_agent".split()
)
"""Options of `from_pretrained` that say where a file is: they are not fields of a configuration."""


@functools.cache
def _read_table() -> dict[str, dict[str, Any]]:
    rows = {name.lower(): row for name, row in read_toml(TABLE).items()}
    return {name: _with_base(rows, row) for name, row in rows.items()}


def _with_base(rows: dict[str, dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in row.items() if key != "like"}
    return {**_with_base(rows, rows[row["like"].lower()]), **own} if "like" in row else own


def find_configuration(name: object) -> dict[str, Any] | None:
    """The fields of a public model's config.json that decide shapes; None for a model that is not in the table."""
    short = str(name).rstrip("/").rpartition("/")[2].lower()
    table = _read_table()
    for ending in ("", *ENDINGS):
        if short.endswith(ending) and (found := table.get(short.removesuffix(ending) if ending else short)):
            return dict(found)
    return None


def find_vocabulary_size(fields: dict[str, Any]) -> int:
    """The rows of the embedding of a model with these fields; 0 for models that take no tokens."""
    transformers: Any = importlib.import_module("transformers")
    own = {key: value for key, value in fields.items() if key not in ("model_type", "architectures")}
    configuration = transformers.CONFIG_MAPPING[fields["model_type"]](**own)
    return getattr(configuration.get_text_config(), "vocab_size", None) or 0


def _find_missing(name: object, part: object) -> dict[str, Any] | None:
    if os.path.isdir(str(name)):
        return None
    return find_part(name, part) if part else find_configuration(name)


@when_imported("transformers.configuration_utils", "PretrainedConfig.get_config_dict")  # before release 5
@when_imported("transformers.configuration_utils", "PreTrainedConfig.get_config_dict")
def find_missing_configuration(original: Function) -> Any:
    """The configuration of a public model that is not here, with `--offline-data`."""
    plain = getattr(original, "__func__", original)

    def get_config_dict(cls: object, /, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        try:
            return plain(cls, name, **kwargs)
        except OSError:
            found = _find_missing(name, kwargs.get("subfolder")) if is_made_up() else None
            if found is None:
                raise
            add_note(
                f"{str(name)!r}: its config.json is not on this machine; shapes are those of understudy's table"
            )
            unused = {key: value for key, value in kwargs.items() if key not in HUB_OPTIONS}
            return {
                "architectures": find_architectures(found["model_type"]),
                **found,
                "_name_or_path": str(name),
            }, unused

    return classmethod(get_config_dict)


MAPPINGS = (
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
)


def find_architectures(model_type: str) -> list[str] | None:
    """The class that a public checkpoint of this type names: the first of transformers' tables that has the type."""
    tables: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    found = (
        getattr(tables, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).get(model_type) for mapping in MAPPINGS
    )
    return next(([name] if isinstance(name, str) else list(name) for name in found if name), None)
