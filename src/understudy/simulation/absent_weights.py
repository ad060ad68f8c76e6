"""Weights that are not on this machine, of torch.hub, torchvision, timm and open_clip: they are not needed.

Shapes come from the program: what would be downloaded only fills parameters that exist. In its place programs get an empty
`AbsentWeights`, and loading it, or what a program makes of it, changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from understudy import _torch
from understudy.patching import REHEARSAL, patch_call
from understudy.simulation.libraries import MissingFileError, when_imported
from understudy.simulation.offline.switch import is_made_up
from understudy.simulation.run_notes import active_notes, add_note
from understudy.simulation.write_log import active_log

Function = Callable[..., Any]
NOTE = "weights not on this machine, and not needed: "


class AbsentWeights(OrderedDict[str, Any]):
    """A state dict without entries. Parts of it (`checkpoint["model"]`) are like it."""

    file = "a checkpoint"

    def __missing__(self, key: object) -> AbsentWeights:
        return _name_absent(self.file)

    def __getattr__(self, name: str) -> Any:
        """A part that holds options, from which the program would build its model, can't be left out."""
        raise AttributeError(
            f"{self.file} is not on this machine, and the program reads {name!r} from it, which is not a weight: save the "
            "file where the program looks for it first, or allow the network with --online"
        )


def _name_absent(file: str) -> AbsentWeights:
    absent = AbsentWeights()
    absent.file = file
    return absent


def _note_absence(what: object) -> AbsentWeights:
    add_note(f"{NOTE}{what}")
    return _name_absent(str(what))


def _has_absent_weights() -> bool:
    notes = active_notes()
    return notes is not None and any(note.startswith(NOTE) for note in notes.notes)


@patch_call("torch.hub.load_state_dict_from_url", during=REHEARSAL)
def leave_out_download(original: Function, url: str, *args: Any, **kwargs: Any) -> Any:
    """torchvision (`weights=`) and many scripts download weights with it. A file in the cache is read."""
    try:
        return original(url, *args, **kwargs)
    except OSError:
        if _torch.active_fake_mode() is None:
            raise
        return _note_absence(url.rpartition("/")[2])


@patch_call("torch.nn.Module.load_state_dict", during=REHEARSAL)
def load_nothing(
    original: Function, self: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Absent weights, and empty dicts that were made of them, change no parameter."""
    is_absent = isinstance(state_dict, AbsentWeights) or (not state_dict and _has_absent_weights())
    if not is_absent or _torch.active_fake_mode() is None:
        return original(self, state_dict, *args, **kwargs)
    keys: Any = importlib.import_module("torch.nn.modules.module")._IncompatibleKeys
    return keys([], [])


def _is_out_of_reach(repository: str) -> bool:
    """Not in the cache of torch.hub, and not to be downloaded: torch would ask whether to trust it first."""
    log = active_log()
    if _torch.active_fake_mode() is None or log is None or log.is_online:
        return False
    hub: Any = importlib.import_module("torch.hub")
    start = repository.partition(":")[0].replace("/", "_") + "_"
    return not any(
        name.startswith(start) for name in (os.listdir(hub.get_dir()) if os.path.isdir(hub.get_dir()) else ())
    )


@patch_call("torch.hub.list", during=REHEARSAL)
def list_nothing(original: Function, github: str, *args: Any, **kwargs: Any) -> Any:
    """The models of a repository that is not here: none with `--offline-data`, else the error names it."""
    if not _is_out_of_reach(github):
        return original(github, *args, **kwargs)
    if not is_made_up():
        raise _make_error("list", github)
    add_note(f"torch.hub.list({github!r}): not on this machine; no models are listed")
    return []


@patch_call("torch.hub.load", during=REHEARSAL)
def load_from_installed_package(
    original: Function, repo_or_dir: str, model: str, *args: Any, **kwargs: Any
) -> Any:
    """The models of `pytorch/vision` are those of the torchvision that is installed; other repositories have to be here."""
    if kwargs.get("source") == "local" or not _is_out_of_reach(repo_or_dir):
        return original(repo_or_dir, model, *args, **kwargs)
    is_vision = repo_or_dir.partition(":")[0] == "pytorch/vision"
    if not is_vision or importlib.util.find_spec("torchvision") is None:
        raise _make_error("load", repo_or_dir)
    add_note(f"torch.hub.load({repo_or_dir!r}): {model} of the torchvision that is installed")
    options = {key: value for key, value in kwargs.items() if key not in HUB_OPTIONS}
    return getattr(importlib.import_module("torchvision.models"), model)(*args, **options)


HUB_OPTIONS = frozenset(inspect.signature(importlib.import_module("torch.hub").load).parameters) - {
    "args",
    "kwargs",
}
"""Options of `torch.hub.load` that are not those of the model."""


def _make_error(function: str, repository: str) -> MissingFileError:
    owner = repository.partition(":")[0]
    return MissingFileError(
        f"torch.hub.{function}({repository!r}): the repository is not in the cache of torch.hub, and a rehearsal downloads "
        f"nothing; clone https://github.com/{owner} and pass its folder with source='local', or allow the network with "
        "--online"
    )


@when_imported("timm.models._builder", "load_pretrained")
def leave_out_timm_weights(original: Function) -> Function:
    """`timm.create_model(pretrained=True)`: the model is as without weights."""

    def load_pretrained(model: Any, pretrained_cfg: Any = None, *args: Any, **kwargs: Any) -> None:
        if _torch.active_fake_mode() is None:
            return original(model, pretrained_cfg, *args, **kwargs)
        _note_absence(f"timm {type(model).__name__}")
        return None

    return load_pretrained


@when_imported("open_clip.pretrained", "download_pretrained")
@when_imported("open_clip.factory", "download_pretrained")
def name_absent_clip_weights(original: Function) -> Function:
    """`open_clip.create_model(pretrained=...)`: a path that `load_checkpoint` leaves alone."""

    def download_pretrained(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(cfg, *args, **kwargs)
        except (OSError, RuntimeError):
            if _torch.active_fake_mode() is None:
                raise
            _note_absence(f"open_clip {cfg.get('hf_hub') or cfg.get('url')}")
            return ABSENT_FILE

    return download_pretrained


@when_imported("open_clip.factory", "load_checkpoint")
def leave_out_clip_weights(original: Function) -> Function:
    """The model is as without weights."""

    def load_checkpoint(model: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpoint_path == ABSENT_FILE and _torch.active_fake_mode() is not None:
            return {}
        return original(model, checkpoint_path, *args, **kwargs)

    return load_checkpoint


ABSENT_FILE = "weights that are not here"
