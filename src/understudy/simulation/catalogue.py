"""The cards that can be simulated: `devices.toml`, user files in the same format, and the machine itself as "cpu".

find_card("h100"), find_card("RTX 4090"), find_card("nvidia a100-80GB")    names are matched kindly
parse_devices("8xa100-80g")                                                the card, and how many of it
read_cards("my_cards.toml")                                                one's own cards
save_calibration("rtx4090", context=...)                                   what was measured on the user's own card
"""

from __future__ import annotations

import difflib
import importlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from understudy.spec.device_facts import DeviceFacts

GiB = 1 << 30
GB = 10**9
TERA = 10**12

CATALOGUE_FILE = Path(__file__).with_name("devices.toml")

TYPICAL_CONTEXT = GiB // 2
"""Assumed memory outside of the allocator on CUDA cards without a known figure: the median of the known ones."""


class UnknownDeviceError(UnderstudyError, ValueError):
    """No card has this name. `suggestions` are names that are near."""

    def __init__(self, name: str, suggestions: Iterable[str]) -> None:
        self.name = name
        self.suggestions = tuple(suggestions)
        hint = (
            f"did you mean {' or '.join(self.suggestions)}?"
            if self.suggestions
            else "see `understudy devices`"
        )
        super().__init__(f"unknown device {name!r}: {hint}")


class CatalogueError(UnderstudyError, ValueError):
    """A file of cards that can't be read. `place` is the file, and the card in it."""

    def __init__(self, reason: str, place: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place


@dataclass(frozen=True, slots=True)
class Software:
    """The libraries that are simulated with every card: those of the torch build that is installed by default."""

    cuda: str
    cudnn: int
    nccl: str
    driver: str

    def __str__(self) -> str:
        cudnn = f"{self.cudnn // 10_000}.{self.cudnn // 100 % 100}.{self.cudnn % 100}"
        return f"CUDA {self.cuda}, cuDNN {cudnn}, NCCL {self.nccl}, driver {self.driver}"


@dataclass(frozen=True, slots=True)
class NcclFigures:
    """What a communicator takes outside of the allocator, from `low` to `high` bytes; `single`: of a group of one rank, at
    most. Channels for each peer of messages are from `low_channels` to `high_channels`."""

    low: int
    high: int
    low_channels: int
    high_channels: int
    single: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    """A device by its published figures; None is unknown. Sizes in bytes, speeds in bytes and operations per second.

    `memory` is what the driver reports, `context` what a process takes of it outside of the allocator. `throughput` is
    dense, by dtype; `sources` says where each figure is from.
    """

    key: str
    name: str
    kind: str
    memory: int
    context: int | None = None
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    threads_per_multiprocessor: int | None = None
    bandwidth: float | None = None
    interconnect: str | None = None
    interconnect_bandwidth: float | None = None
    throughput: Mapping[str, float] = field(default_factory=dict, hash=False)
    aliases: tuple[str, ...] = ()
    note: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    nccl: NcclFigures | None = None
    error: float | None = None
    """By how much the simulated allocator missed the reserved memory of a real run on this card: see `save_calibration`."""

    def __str__(self) -> str:
        return f"{self.key} ({self.name}, {self.memory / GiB:.2f} GiB)"

    @property
    def outside(self) -> int:
        """The memory outside of the allocator: as published, or as is typical; none on a CPU."""
        if self.context is not None:
            return self.context
        return 0 if self.kind == "cpu" else TYPICAL_CONTEXT

    @property
    def usable(self) -> int:
        """What the allocator may reserve."""
        return self.memory - self.outside

    def facts(self) -> DeviceFacts:
        from understudy.spec.device_facts import DeviceFacts  # why: the package of specs imports torch

        software = read_software()
        is_cuda = self.kind == "cuda"
        return DeviceFacts(
            kind=self.kind,
            capability=self.capability or (0, 0),
            multiprocessors=self.multiprocessors or 0,
            threads_per_multiprocessor=self.threads_per_multiprocessor or 0,
            cuda=software.cuda if is_cuda else "",
            cudnn=software.cudnn if is_cuda else 0,
        )

    def to_record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        record: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        nccl = None if self.nccl is None else asdict(self.nccl)
        return record | {"nccl": nccl, "throughput": dict(self.throughput), "sources": dict(self.sources)}


# the catalogue


def list_cards() -> tuple[Card, ...]:
    """All of the catalogue, as it was calibrated, and this machine's CPU."""
    measured = {
        key: {name: own[name] for name in _MEASURED if name in own} for key, own in read_calibration().items()
    }
    return tuple(replace(card, **measured.get(card.key, {})) for card in _read_published_cards())


@cache
def _read_published_cards() -> tuple[Card, ...]:
    return (*read_cards(CATALOGUE_FILE), make_cpu_card())


@cache
def read_software() -> Software:
    table = read_toml(CATALOGUE_FILE)["software"]
    return Software(**{name: value for name, value in table.items() if name != "sources"})


def make_cpu_card() -> Card:
    pages, page = (
        os.sysconf(name) if hasattr(os, "sysconf") else 0 for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    )
    return Card(
        key="cpu",
        name=f"{platform.machine()}, {os.cpu_count()} cores",
        kind="cpu",
        memory=pages * page,
        note="this machine",
        sources={"memory": "the operating system"},
    )


def find_card(name: str, more: Iterable[Card] = ()) -> Card:
    """The card with this name, however it is written; `more` are one's own, which come first."""
    cards = (*more, *list_cards())
    wanted = _normalise(name)
    for card in cards:
        if wanted in _list_names(card):
            return card
    names = {known: card.key for card in cards for known in _list_names(card)}
    near = [key for known, key in names.items() if wanted and known.startswith(wanted)]
    near += [names[known] for known in difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)]
    raise UnknownDeviceError(name, list(dict.fromkeys(near))[:3])


def parse_devices(text: str, more: Iterable[Card] = ()) -> tuple[Card, int]:
    """A card and how many of it: "h100", "8xh100", "2 x RTX 4090"; "cards.toml" or "cards.toml:2 x my-card" of a file."""
    path, is_file, name = text.partition(".toml")
    if is_file:
        return _parse_devices_of_file(f"{path}.toml", name.removeprefix(":"))
    found = re.fullmatch(r"\s*(?:(\d+)\s*[xX×*]\s*)?(.*?)\s*", text)
    assert found is not None
    count = int(found[1] or 1)
    if not 1 <= count <= 1024 or not found[2]:
        raise UnknownDeviceError(text, ())
    return find_card(found[2], more), count


def _parse_devices_of_file(path: str, name: str) -> tuple[Card, int]:
    cards = read_cards(path)
    if name:
        return parse_devices(name, cards)
    if len(cards) != 1:
        names = "".join(f", {card.key}" for card in cards)
        hint = f": name one of them, as in {path}:{cards[0].key}" if cards else ""
        raise CatalogueError(f"has {len(cards)} cards{names}{hint}", path)
    return cards[0], 1


_DECORATION = re.compile(r"nvidia|geforce|rtx|tesla|amd|instinct|radeon|sxm\d?|pcie|hbm\d?e?|gpu|[^a-z0-9]")


def _normalise(name: str) -> str:
    """Without the maker, the board, and the unit of the memory: "NVIDIA A100-SXM4-80GB" and "a100-80g" are "a10080"."""
    return re.sub(r"(?<=\d)gi?b?$", "", _DECORATION.sub("", name.lower()))


def _list_names(card: Card) -> set[str]:
    return {_normalise(name) for name in (card.key, card.name, *card.aliases)}


# files of cards


def read_cards(path: str | Path) -> tuple[Card, ...]:
    """The cards of a TOML file, in its order."""
    tables = read_toml(Path(path))
    return tuple(
        _make_card(key, table, f"{path}, [{key}]") for key, table in tables.items() if key != "software"
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file, or a `CatalogueError` that names it."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with path.open("rb") as file:
            tables: dict[str, Any] = toml.load(file)
    except OSError as error:
        raise CatalogueError(error.strerror or str(error), str(path)) from None
    except ValueError as error:  # no TOML, or no text
        raise CatalogueError(f"invalid TOML: {error}", str(path)) from None
    return tables


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str, "kind": str, "aliases": list, "memory": (int, float), "context": (int, float), "capability": str,
    "multiprocessors": int, "threads_per_multiprocessor": int, "bandwidth": (int, float), "interconnect": dict,
    "nccl": dict, "teraflops": dict, "note": str, "sources": dict,
}  # fmt: skip
KINDS = ("cuda", "rocm", "cpu")


def _make_card(key: str, table: Any, place: str) -> Card:
    _check_fields(table, place)
    capability = re.fullmatch(r"(\d+)\.(\d+)", table.get("capability", "0.0"))
    if capability is None:
        raise CatalogueError(f'expected capability as in "9.0", got {table["capability"]!r}', place)
    link = table.get("interconnect", {})
    return Card(
        key=key,
        name=table.get("name", key),
        kind=table.get("kind", "cuda"),
        memory=round(table["memory"] * GiB),
        context=round(table["context"] * GiB) if "context" in table else None,
        capability=(int(capability[1]), int(capability[2])) if "capability" in table else None,
        multiprocessors=table.get("multiprocessors"),
        threads_per_multiprocessor=table.get("threads_per_multiprocessor"),
        bandwidth=table["bandwidth"] * GB if "bandwidth" in table else None,
        interconnect=link.get("name"),
        interconnect_bandwidth=link["bandwidth"] * GB if "bandwidth" in link else None,
        nccl=_read_nccl(table["nccl"], place) if "nccl" in table else None,
        throughput={dtype: figure * TERA for dtype, figure in table.get("teraflops", {}).items()},
        aliases=tuple(table.get("aliases", ())),
        note=table.get("note", ""),
        sources=table.get("sources", {}),
    )


def _read_nccl(table: dict[str, Any], place: str) -> NcclFigures:
    numbers = {name: value for name, value in table.items() if name in ("low", "high", "single")}
    channels = table.get("channels")
    if (
        not {"low", "high"} <= numbers.keys()
        or not table.keys() <= {"low", "high", "single", "channels"}
        or not all(isinstance(value, (int, float)) and value >= 0 for value in numbers.values())
        or not (
            isinstance(channels, list) and len(channels) == 2 and all(isinstance(n, int) for n in channels)
        )
    ):
        raise CatalogueError(
            f"nccl must be as in {{ low = 0.3, high = 0.9, channels = [16, 32] }} (GiB), got {table!r}", place
        )
    sizes = {name: round(value * GiB) for name, value in numbers.items()}
    return NcclFigures(**sizes, low_channels=channels[0], high_channels=channels[1])


def _check_fields(table: object, place: str) -> None:
    if not isinstance(table, dict):
        raise CatalogueError("expected a table of figures for each card", place)
    for name, value in table.items():
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(_FIELDS)}"
            raise CatalogueError(f"unknown field {name!r}: {hint}", place)
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise CatalogueError(f"{name}: invalid value {value!r}", place)
    if not table.get("memory", 0) > 0:
        raise CatalogueError("memory, in GiB, is missing", place)
    if table.get("kind", "cuda") not in KINDS:
        raise CatalogueError(f"expected kind to be one of {', '.join(KINDS)}, got {table['kind']!r}", place)


# calibration: measurements on the user's own cards


def calibration_file() -> Path:
    """In the folder $UNDERSTUDY_CONFIG, else where the system keeps the settings of its users."""
    folder = os.environ.get("UNDERSTUDY_CONFIG")
    if not folder:
        home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
        folder = os.path.join(home, "understudy")
    return Path(folder) / "calibration.toml"


_MEASURED = ("context", "error")


def read_calibration() -> dict[str, dict[str, Any]]:
    """By the card's key: the fields that were measured. Empty where nothing was."""
    path = calibration_file()
    if not path.exists():
        return {}
    found: dict[str, dict[str, Any]] = {}
    for key, table in read_toml(path).items():
        if not isinstance(table, dict) or not all(
            isinstance(table.get(name, 0), (int, float)) and table.get(name, 0) >= 0 for name in _MEASURED
        ):
            raise CatalogueError(
                "expected a calibration with a context in GiB and an error, both numbers", f"{path}, [{key}]"
            )
        speed = table.get("speed", {})
        if not isinstance(speed, dict) or not all(
            isinstance(value, (int, float)) and value > 0 for value in speed.values()
        ):
            raise CatalogueError("expected positive numbers by family of kernels", f"{path}, [{key}.speed]")
        found[key] = {"error": table["error"]} if "error" in table else {}
        found[key] |= {"speed": speed} if speed else {}
        if "context" in table:
            found[key]["context"] = round(table["context"] * GiB)
    return found


def save_calibration(
    key: str,
    *,
    context: int | None = None,
    error: float | None = None,
    speed: Mapping[str, float] | None = None,
) -> Path:
    """Store measurements of a card; None keeps the previous value. Return the file."""
    measured = read_calibration()
    own = measured.setdefault(key, {})
    given = {"context": context, "error": error, "speed": speed}
    own |= {name: value for name, value in given.items() if value is not None}
    path = calibration_file()
    lines = [
        "# Written by `understudy calibrate`: memory outside of the allocator in GiB, error of reserved memory, speed of",
        "# kernel families, relative to the curves of the card.",
    ]
    for card, figures in measured.items():
        lines.append(f"\n[{card}]")
        if "context" in figures:
            lines.append(f"context = {figures['context'] / GiB:.12f}")
        if "error" in figures:
            lines.append(f"error = {figures['error']:.6f}")
        if "speed" in figures:
            lines.append(f"\n[{card}.speed]")
            lines += [f"{name} = {factor:.4f}" for name, factor in figures["speed"].items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    except OSError as problem:
        raise CatalogueError(problem.strerror or str(problem), str(path)) from None
    return path
