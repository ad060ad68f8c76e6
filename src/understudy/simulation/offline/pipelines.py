"""Models of diffusers: built from their configurations, without weights; configurations of the public pipelines of
`pipelines.toml`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from understudy import _torch
from understudy.simulation.catalogue import read_toml
from understudy.simulation.libraries import MissingFileError, when_imported
from understudy.simulation.offline.switch import is_made_up
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]
TABLE = Path(__file__).with_name("pipelines.toml")


@functools.cache
def _read_table() -> list[dict[str, Any]]:
    return read_toml(TABLE)["pipeline"]


def find_part(name: object, part: object) -> dict[str, Any] | None:
    """The fields of one part ("unet", "text_encoder") of a public pipeline; None for other parts. A VAE that is published
    separately has no part."""
    short = str(name).lower()
    for row in _read_table():
        if any(known in short for known in row["names"]):
            found = row.get(str(part or "")) if part else row["vae"] if "vae" in short else None
            return None if found is None else dict(found)
    return None


@when_imported("diffusers.configuration_utils", "ConfigMixin.load_config")
def find_missing_part(original: Function) -> Any:
    """The configuration of a part that is not here: of the table with `--offline-data`, else named in the error."""
    plain = getattr(original, "__func__", original)

    def load_config(
        cls: Any,
        /,
        pretrained_model_name_or_path: Any,
        return_unused_kwargs: bool = False,
        return_commit_hash: bool = False,
        **kwargs: Any,
    ) -> Any:
        name = pretrained_model_name_or_path
        try:
            return plain(cls, name, return_unused_kwargs, return_commit_hash, **kwargs)
        except OSError as error:
            part = kwargs.get("subfolder")
            found = find_part(name, part) if is_made_up() else None
            if found is None:
                if _torch.active_fake_mode() is None:
                    raise
                where = f"{part}/{cls.config_name}" if part else cls.config_name
                raise MissingFileError(
                    f"{cls.__name__}.from_pretrained({str(name)!r}): its {where} is not on this machine, and a rehearsal "
                    f"downloads nothing; fetch that one small file with `hf download {name} {where}`, or allow the network "
                    "with --online; --offline-data supports Stable Diffusion only"
                ) from error
            add_note(
                f"{str(name)!r}: its {cls.config_name} is not on this machine; shapes are those of understudy's table"
            )
            unused = {key: value for key, value in kwargs.items() if key not in HUB_OPTIONS}
            extra = (*((unused,) if return_unused_kwargs else ()), *((None,) if return_commit_hash else ()))
            return (found, *extra) if extra else found

    return classmethod(load_config)


HUB_OPTIONS = frozenset(
    "cache_dir local_dir local_dir_use_symlinks force_download proxies token local_files_only revision mirror subfolder "
    "user_agent dduf_entries".split()
)
LOADING_OPTIONS = HUB_OPTIONS | frozenset(
    "ignore_mismatched_sizes from_flax output_loading_info torch_dtype dtype device_map max_memory offload_folder "
    "offload_state_dict low_cpu_mem_usage variant use_safetensors quantization_config disable_mmap parallel_config "
    "return_unused_kwargs".split()
)
"""Options of `from_pretrained` that are not fields of a configuration."""


@when_imported("diffusers.models.modeling_utils", "ModelMixin.from_pretrained")
def build_part(original: Function) -> Any:
    """The configuration gives all shapes: weights are neither downloaded nor read."""
    plain = getattr(original, "__func__", original)

    def from_pretrained(cls: Any, /, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        if _torch.active_fake_mode() is None or kwargs.get("quantization_config") is not None:
            return plain(cls, name, **kwargs)
        hub = {key: kwargs[key] for key in HUB_OPTIONS & kwargs.keys()}
        fields = {key: value for key, value in kwargs.items() if key not in LOADING_OPTIONS}
        config, unused, _ = cls.load_config(
            name, return_unused_kwargs=True, return_commit_hash=True, **hub, **fields
        )
        model = cls.from_config(config, **unused)
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if isinstance(dtype, torch.dtype):
            model = model.to(dtype)
        model.register_to_config(_name_or_path=str(name))
        model.eval()
        add_note(
            f"{cls.__name__}.from_pretrained({str(name)!r}): built from its configuration, weights not read"
        )
        if kwargs.get("output_loading_info"):
            return model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
        return model

    return classmethod(from_pretrained)
