"""What libraries do otherwise while a script is rehearsed: weights are not read, nothing leaves the machine.

Libraries are loaded by the script, if at all; so each of these is applied when its module has been imported:

    @when_imported("safetensors.torch", "save_file")
    def save_header(original): ...

The registered functions make patches of places that are found while the program runs (`understudy.patching`).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.patching import REHEARSAL, Hold, patch, patch_found
from understudy.simulation.overlay import active_overlay, place_for, redirect_path
from understudy.simulation.run_notes import add_note
from understudy.simulation.sandbox import NAMESPACES, NO_SANDBOX, PYTHON
from understudy.simulation.write_log import note_refused

Function = Callable[..., Any]


class LibraryPatch(NamedTuple):
    module: str
    path: tuple[str, ...]
    """From the module to the place: ("PreTrainedModel", "from_pretrained")."""
    make: Function
    applies: str

    def apply(self, hold: Hold, module: ModuleType) -> None:
        owner: Any = module
        for name in self.path[:-1]:
            owner = getattr(owner, name, None)
            if isinstance(owner, type) and owner.__name__ != name:
                return  # an older name of a class that has a patch by its own
        if owner is not None and hasattr(owner, self.path[-1]):
            hold.replace(owner, self.path[-1], self.make)


LIBRARY_PATCHES: list[LibraryPatch] = []


class MissingFileError(UnderstudyError, OSError):
    """A small file that a rehearsal needs is not there. `path` is where it was looked for."""


ALWAYS, UNLESS_WRITING, WHEN_REDIRECTED = "always", "unless writing is allowed", "without namespaces"


def when_imported(module: str, *places: str, applies: str = ALWAYS) -> Callable[[Function], Function]:
    """Register a patch of places of a library. `applies`: always; not where the script may write; only where files are
    redirected in Python, because no namespaces hold them."""

    def register(make: Function) -> Function:
        patch_found(f"{module}: {', '.join(places)}", during=REHEARSAL)(make)
        LIBRARY_PATCHES.extend(
            LibraryPatch(module, tuple(place.split(".")), make, applies) for place in places
        )
        return make

    return register


@contextmanager
def adapt_libraries(hold: Hold, level: str = PYTHON, is_online: bool = False) -> Iterator[None]:
    """Adapt libraries that are imported, now and later. `level`: the level of the sandbox."""
    finder = _Finder(hold, level)
    environment = {**({} if level == NO_SANDBOX else NO_TRACKERS), **({} if is_online else NO_DOWNLOADS)}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    settings = [
        (sys.modules[name].__dict__, key)
        for name, key in READ_AT_IMPORT
        if name in sys.modules and not is_online
    ]
    before_here = [module.get(key) for module, key in settings]
    for module, key in settings:
        module[key] = True
    sys.meta_path.insert(0, finder)
    try:
        for name in {found.module for found in LIBRARY_PATCHES}:
            if name in sys.modules:
                finder.apply(sys.modules[name])
        yield
    finally:
        sys.meta_path.remove(finder)
        for (module, key), value in zip(settings, before_here, strict=True):
            module[key] = value
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


NO_DOWNLOADS = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
READ_AT_IMPORT = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))
"""What `NO_DOWNLOADS` sets, in modules that were imported before: they would try each request again for half a minute."""
NO_TRACKERS = {
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false", "TRACKIO_DISABLED": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip
"""Settings by which libraries leave the network alone."""


class _Finder(importlib.abc.MetaPathFinder):
    """Sees each import, and patches a module when it has run."""

    def __init__(self, hold: Hold, level: str) -> None:
        self.hold = hold
        left_out = {NO_SANDBOX: (UNLESS_WRITING, WHEN_REDIRECTED), NAMESPACES: (WHEN_REDIRECTED,)}.get(
            level, ()
        )
        self.patches = [found for found in LIBRARY_PATCHES if found.applies not in left_out]
        self._modules = {found.module for found in self.patches}
        self._busy: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._modules or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def apply(self, module: ModuleType) -> None:
        for found in self.patches:
            if found.module == module.__name__:
                found.apply(self.hold, module)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.apply(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


# --- trackers ------------------------------------------------------------------------------------------------------


@when_imported("wandb", "init", applies=UNLESS_WRITING)
def note_wandb(original: Function) -> Function:
    """Runs are not uploaded: wandb is disabled by its own setting."""
    return _make_noting_function(original, "tracker", "wandb")


@when_imported("mlflow", "start_run", applies=UNLESS_WRITING)
def note_mlflow(original: Function) -> Function:
    """Runs are kept in the overlay."""
    return _make_noting_function(original, "tracker", "mlflow")


@when_imported("torch.utils.tensorboard.writer", "SummaryWriter.__init__", applies=UNLESS_WRITING)
def note_tensorboard(original: Function) -> Function:
    """Its event files are in the overlay."""
    return _make_noting_function(original, "tracker", "tensorboard")


@when_imported("tensorboardX.x2num", "make_np")
def read_stand_in(original: Function) -> Function:
    """tensorboardX finds tensors by the text of their class."""

    def make_np(x: Any) -> Any:
        return original(x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x)

    return make_np


@when_imported("torch.utils.tensorboard.writer", "SummaryWriter.add_graph")
@when_imported("tensorboardX.writer", "SummaryWriter.add_graph")
def leave_out_graph(original: Function) -> Function:
    """The graph of a model is drawn by torch.jit.trace, which needs values."""

    def add_graph(self: object, *args: object, **kwargs: object) -> None:
        if _torch.active_fake_mode() is None:
            return original(self, *args, **kwargs)
        return add_note("SummaryWriter.add_graph: left out, because it traces values")

    return add_graph


def _make_noting_function(original: Function, what: str, target: str) -> Function:
    def call(*args: object, **kwargs: object) -> Any:
        note_refused(what, target)
        return original(*args, **kwargs)

    return call


@when_imported(
    "huggingface_hub.hf_api", "HfApi.upload_file", "HfApi.upload_folder", "HfApi.create_repo", "HfApi.create_commit",
    applies=UNLESS_WRITING,
)  # fmt: skip
def refuse_pushes(original: Function) -> Function:
    """Nothing is pushed to a hub."""

    def push(self: object, *args: object, **kwargs: object) -> None:
        note_refused("push", str(kwargs.get("repo_id", "a hub")))

    return push


# --- files that are opened in C++ and Rust ----------------------------------------------------------------------------


@when_imported("numpy.lib._datasource", "DataSource.open", applies=WHEN_REDIRECTED)
def open_text_in_overlay(original: Function) -> Function:
    """`numpy.savetxt` and similar functions keep the `open` from before a rehearsal."""

    def open_in_place(self: object, path: Any, mode: str = "r", *args: object, **kwargs: object) -> Any:
        overlay = active_overlay()
        place = path if overlay is None else overlay.run(place_for, overlay, path, mode)
        return original(self, os.fspath(place), mode, *args, **kwargs)

    return open_in_place


@when_imported(
    "transformers.tokenization_utils_base", "PreTrainedTokenizerBase.save_pretrained", applies=WHEN_REDIRECTED
)
def save_tokenizer_in_overlay(original: Function) -> Function:
    """Rust writes the vocabulary of fast tokenizers."""

    def save(self: object, save_directory: Any, *args: object, **kwargs: object) -> Any:
        os.makedirs(save_directory, exist_ok=True)
        return redirect_path(original, 1, "save_directory", "save_pretrained")(
            self, save_directory, *args, **kwargs
        )

    return save


# --- masks: without padding none is made, which transformers looks for unless it traces -----------------------------------


@when_imported("transformers.utils.import_utils", "is_fake_tensor")
def read_masks(original: Function) -> Function:
    """Where reads of data are answered, a program takes the path of a real run, not the one for tracing."""
    return lambda tensor: original(tensor) and getattr(_torch.active_fake_mode(), "answers", None) is None


def adapt_path(hold: Hold) -> None:
    """For a function that is rehearsed: of the imported libraries, the patches that decide which code path runs."""
    for found in LIBRARY_PATCHES:
        if found.make is read_masks and (module := sys.modules.get(found.module)) is not None:
            found.apply(hold, module)


# --- addresses: libraries find tensors that share memory by them ---------------------------------------------------------

NOWHERE = 0x5000_0000_0000
"""No program has memory there: who reads it is stopped at once."""


@patch("torch.UntypedStorage.data_ptr", during=REHEARSAL)
def number_storages(original: Function) -> Function:
    """transformers finds tied parameters by the addresses of their storages: stand-ins get a number for each storage."""

    def data_ptr(self: Any) -> int:
        try:
            return original(self)
        except RuntimeError:  # of a stand-in
            return NOWHERE + _torch.storage_number(self)

    return data_ptr


@patch("understudy.fake.tensor.FakeTensor.data_ptr", during=REHEARSAL)
def number_tensors(original: Function) -> Function:
    """As `number_storages`, for tensors."""

    def data_ptr(self: Any) -> int:
        return NOWHERE + _torch.storage_id(self) + self.storage_offset() * self.element_size()

    return data_ptr


# --- safetensors: headers say all ----------------------------------------------------------------------------------------

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(path: Any) -> dict[str, Any]:
    """Names, shapes and dtypes of the tensors of a file; `__metadata__` besides."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    return header


def _make_stand_ins(header: dict[str, Any], device: Any) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device)
        for name, entry in header.items()
        if name != "__metadata__"
    }


@when_imported("safetensors.torch", "load_file")
def load_header(original: Function) -> Function:
    """Stand-ins of the right shapes, without reading the data."""

    def load_file(filename: object, device: object = "cpu", **kwargs: object) -> Any:
        if _torch.active_fake_mode() is None:
            return original(filename, device, **kwargs)
        return _make_stand_ins(read_header(filename), device)

    return load_file


@when_imported("safetensors.torch", "save_file")
def save_header(original: Function) -> Function:
    """Write a file with the right header and size, and holes for missing data."""

    def save_file(tensors: dict[str, Any], filename: Any, metadata: object = None, **kwargs: object) -> None:
        if not any(_torch.is_stand_in(tensor) for tensor in tensors.values()):
            return original(tensors, filename, metadata, **kwargs)
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(filename, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        return None

    return save_file


@when_imported("safetensors.torch", "serialize_file", applies=WHEN_REDIRECTED)
@when_imported("safetensors.numpy", "serialize_file", applies=WHEN_REDIRECTED)
def serialize_in_overlay(original: Function) -> Function:
    """Rust writes the file."""
    return redirect_path(original, 1, "filename", "safetensors")


@when_imported("safetensors.torch", "_flatten", "_flatten_as_ptr")
def write_zeros(original: Function) -> Function:
    """Stand-ins have no bytes and no address that Rust could read: zeros are written in their place."""

    def flatten(tensors: dict[str, Any], *args: Any) -> Any:
        if not any(_torch.is_stand_in(tensor) for tensor in tensors.values()):
            return original(tensors, *args)
        zeros = {name: _torch.real_zeros(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for kept in args:  # what Rust reads has to live until then
            kept.append(zeros)
        with _torch.no_modes():
            return original(zeros, *args)

    return flatten


class HeaderFile:
    """`safetensors.safe_open`: the tensors are stand-ins."""

    def __init__(
        self, filename: object, framework: str = "pt", device: object = "cpu", **kwargs: object
    ) -> None:
        self._header = read_header(filename)
        self._device = device
        self._metadata = self._header.pop("__metadata__", None)

    def __enter__(self) -> HeaderFile:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def keys(self) -> list[str]:
        return list(self._header)

    offset_keys = keys

    def metadata(self) -> Any:
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        return _make_stand_ins({name: self._header[name]}, self._device)[name]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return _make_stand_ins(self._header, self._device)

    def get_slice(self, name: str) -> HeaderSlice:
        return HeaderSlice(self, name, self._header[name])


class HeaderSlice:
    def __init__(self, file: HeaderFile, name: str, entry: dict[str, Any]) -> None:
        self._file, self._name, self._entry = file, name, entry

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        return str(self._entry["dtype"])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]


@when_imported("safetensors", "safe_open")
@when_imported("safetensors.torch", "safe_open")
def open_header(original: Function) -> Function:
    """Stand-ins of the right shapes, without reading the data."""

    def safe_open(filename: object, framework: str = "pt", device: object = "cpu", **kwargs: object) -> Any:
        if _torch.active_fake_mode() is None or framework not in ("pt", "torch", "pytorch"):
            return original(filename, framework, device, **kwargs)
        return HeaderFile(filename, framework, device, **kwargs)

    return safe_open


# --- transformers: models without weights ------------------------------------------------------------------------------


@when_imported("transformers.modeling_utils", "PreTrainedModel.from_pretrained")
def build_from_configuration(original: Function) -> Any:
    """The configuration defines names, shapes and dtypes of all parameters: weights are neither downloaded nor
    read."""

    def from_pretrained(
        cls: object,
        /,
        pretrained_model_name_or_path: object,
        *args: object,
        config: object = None,
        **kwargs: object,
    ) -> Any:
        name = pretrained_model_name_or_path
        if _torch.active_fake_mode() is None:
            return getattr(original, "__func__", original)(cls, name, *args, config=config, **kwargs)
        if name is None:
            raise MissingFileError(
                "from_pretrained(None): expected the name of a configuration, from which a rehearsal builds the model"
            )
        return _build_model(cls, name, args, config, kwargs)

    return classmethod(from_pretrained)


@when_imported("transformers.utils.hub", "cached_files")
def name_missing_files(original: Function) -> Function:
    """A rehearsal downloads nothing: the error names the required small file, and how to get it."""

    def cached_files(path_or_repo_id: object, filenames: Any, *args: object, **kwargs: object) -> Any:
        try:
            return original(path_or_repo_id, filenames, *args, **kwargs)
        except OSError as error:
            if _torch.active_fake_mode() is None:
                raise
            raise _make_missing_file_error(path_or_repo_id, ", ".join(filenames)) from error

    return cached_files


def _make_missing_file_error(name: object, files: str) -> MissingFileError:
    return MissingFileError(
        f"from_pretrained({str(name)!r}): its {files} is not here, and a rehearsal downloads nothing. Put this "
        f"one small file into a folder and pass the folder, or fetch it once with `hf download {name} {files}`"
    )


HUB_OPTIONS = ("cache_dir", "revision", "subfolder", "token", "trust_remote_code", "proxies")
LOADING_OPTIONS = frozenset(
    {*HUB_OPTIONS, "device_map", "max_memory", "offload_folder", "low_cpu_mem_usage", "use_safetensors", "variant",
     "ignore_mismatched_sizes", "output_loading_info", "force_download", "local_files_only", "from_tf", "from_flax",
     "state_dict", "key_mapping", "offload_state_dict", "offload_buffers", "weights_only", "tp_plan", "use_kernels",
     "attn_implementation", "adapter_kwargs", "gguf_file", "resume_download", "_from_auto", "adapter_name",
     "experts_implementation", "mirror", "commit_hash", "_commit_hash"}
)  # fmt: skip


QUANTISATION_OPTIONS = ("quantization_config", "load_in_4bit", "load_in_8bit")


def _build_model(cls: Any, name: object, args: object, config: object, options: dict[str, Any]) -> Any:
    """Build a model as `from_pretrained` does: in eval mode, with the requested dtype and device."""
    # why: it imports this module
    from understudy.simulation.quantised import find_quantisation, quantise_model

    older_name = options.pop("torch_dtype", None)
    dtype = options.pop("dtype", None) or older_name
    asked = {key: options.pop(key, None) for key in QUANTISATION_OPTIONS}
    config = _read_configuration(cls, name, config, options)
    quantisation = find_quantisation(name, config, asked)
    if dtype is None:
        dtype = _find_default_dtype(quantisation is not None)
    if isinstance(dtype, str):
        found = getattr(config, "dtype", None) or _find_weight_dtype(name) or _read_saved_dtype(cls, name)
        dtype = found if dtype == "auto" else getattr(torch, dtype)
    attention = {key: options[key] for key in ("attn_implementation",) if options.get(key) is not None}
    model = cls._from_config(config, **{_name_of_dtype(): dtype or torch.float32}, **attention)
    loading_info = _compare_with_weights(model, name, bool(options.get("ignore_mismatched_sizes")))
    _read_generation_config(model, name)
    model.name_or_path = str(name)
    device = _find_device(options.get("device_map"))
    if quantisation is not None:
        device = device if device is not None else _find_device("auto")
        quantise_model(model, quantisation, device, dtype or torch.float32)
    if device is not None:
        model.to(device)
    model.eval()
    add_note(f"{cls.__name__}.from_pretrained({str(name)!r}): built from its configuration, weights not read")
    if options.get("output_loading_info"):
        return model, loading_info
    return model


def _find_release() -> tuple[int, ...]:
    return tuple(int(part) for part in sys.modules["transformers"].__version__.split(".")[:2])


def _find_default_dtype(is_quantised: bool) -> Any:
    """What `from_pretrained` takes where a program names no dtype: that of the weights since transformers 5."""
    if _find_release() >= (5, 0):
        return "auto"
    return torch.float16 if is_quantised else torch.get_default_dtype()


def _name_of_dtype() -> str:
    """The argument of `_from_config`, by the release of transformers."""
    return "dtype" if _find_release() >= (4, 56) else "torch_dtype"


def _read_configuration(cls: Any, name: object, config: object, options: dict[str, Any]) -> Any:
    from_hub = {key: value for key, value in options.items() if key in HUB_OPTIONS}
    others = {key: value for key, value in options.items() if key not in LOADING_OPTIONS}
    if config is not None and not isinstance(config, (str, os.PathLike)):
        for key, value in others.items():
            setattr(config, key, value)
        return config
    source = name if config is None else config
    try:
        return cls.config_class.from_pretrained(source, local_files_only=True, **from_hub, **others)
    except OSError as error:
        if isinstance(error, MissingFileError):
            raise
        raise _make_missing_file_error(source, "config.json") from error


def _read_weight_headers(name: Any) -> dict[str, Any]:
    """The entry of each tensor of the weights, if they are here; None where only the index names it."""
    folder = os.fspath(name)
    found: dict[str, Any] = {}
    for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = os.path.join(folder, file)
        if file == "model.safetensors.index.json":
            with open(path, encoding="utf-8") as index:
                found = {**dict.fromkeys(json.load(index)["weight_map"]), **found}
        elif file.startswith("model") and file.endswith(".safetensors"):
            found |= {key: entry for key, entry in read_header(path).items() if key != "__metadata__"}
    return found


def _find_weight_dtype(name: object) -> torch.dtype | None:
    """That of the first floating-point tensor of the weights, if they are here."""
    dtypes = [DTYPES[entry["dtype"]] for entry in _read_weight_headers(name).values() if entry is not None]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def _read_saved_dtype(cls: Any, name: object) -> torch.dtype | None:
    """That of the saved configuration, which weights have too. A program's own configuration may name none."""
    try:
        return getattr(_read_configuration(cls, name, None, {}), "dtype", None)
    except MissingFileError:
        return None


class WeightsMismatchError(UnderstudyError, RuntimeError):
    """Weights whose shapes differ from the configuration."""


def _compare_with_weights(model: Any, name: object, ignores_shapes: bool) -> dict[str, list[Any]]:
    """The loading report of `from_pretrained`. Mismatching shapes are refused, as `from_pretrained` refuses them."""
    weights = _read_weight_headers(name)
    own = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    prefix = f"{model.base_model_prefix}."
    found: dict[str, Any] = {}
    names = {key: (key, prefix + key, key.removeprefix(prefix)) for key in weights}
    unexpected = [key for key in weights if not own.keys() & names[key]]
    for key, entry in weights.items():
        for match in [known for known in names[key] if known in own][:1]:
            found[match] = None if entry is None else tuple(entry["shape"])
    tensors = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(tensors[key]) for key in found if key in tensors}
    missing = (
        [key for key in own if key not in found and id(tensors.get(key)) not in loaded] if weights else []
    )
    wrong = [
        (key, shape, own[key]) for key, shape in found.items() if shape is not None and shape != own[key]
    ]
    if wrong and not ignores_shapes:
        key, shape, expected = wrong[0]
        raise WeightsMismatchError(
            f"from_pretrained({str(name)!r}): size mismatch for {key}: its weights have {shape}, its configuration makes "
            f"{expected} ({len(wrong)} in all); correct config.json, or pass ignore_mismatched_sizes=True"
        )
    if missing or unexpected:
        add_note(f"from_pretrained({str(name)!r}): tensors missing in the weights: {len(missing)}, "
                 f"unexpected: {len(unexpected)}")  # fmt: skip
    return {
        "missing_keys": missing,
        "unexpected_keys": unexpected,
        "mismatched_keys": wrong,
        "error_msgs": [],
    }


def _read_generation_config(model: Any, name: Any) -> None:
    file = os.path.join(os.fspath(name), "generation_config.json")
    if os.path.isfile(file) and getattr(model, "generation_config", None) is not None:
        model.generation_config = type(model.generation_config).from_pretrained(os.fspath(name))


def _find_device(device_map: object) -> Any:
    """One device for all: maps over several, and "auto", take the first."""
    if device_map is None:
        return None
    if isinstance(device_map, dict):
        device_map = next(iter(device_map.values()), "cpu")
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", device_map) if isinstance(device_map, int) else device_map
