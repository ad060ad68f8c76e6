"""`torchvision.datasets` whose files are not here: an error that names them, or made-up pictures with labels."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from understudy import _torch
from understudy.simulation.libraries import MissingFileError, when_imported
from understudy.simulation.offline.columns import BOXES, make_image
from understudy.simulation.offline.switch import is_made_up, note_made_up

Function = Callable[..., Any]
MOST_ROWS = 60_000


class Pictures(NamedTuple):
    """What the pictures of a data set are like, and how many there are; at most 60,000 are made up."""

    width: int
    height: int
    classes: int
    mode: str = "RGB"
    train_rows: int = MOST_ROWS
    test_rows: int = 10_000


KINDS = {
    "MNIST": Pictures(28, 28, 10, "L"),
    "FashionMNIST": Pictures(28, 28, 10, "L"),
    "KMNIST": Pictures(28, 28, 10, "L"),
    "EMNIST": Pictures(28, 28, 47, "L", test_rows=18800),
    "QMNIST": Pictures(28, 28, 10, "L"),
    "USPS": Pictures(16, 16, 10, "L", train_rows=7291, test_rows=2007),
    "CIFAR10": Pictures(32, 32, 10, train_rows=50000),
    "CIFAR100": Pictures(32, 32, 100, train_rows=50000),
    "SVHN": Pictures(32, 32, 10, test_rows=26032),
    "STL10": Pictures(96, 96, 10, train_rows=5000, test_rows=8000),
    "ImageNet": Pictures(500, 375, 1000, test_rows=50000),
    "ImageFolder": Pictures(500, 375, 1000, test_rows=60000),
    "CelebA": Pictures(178, 218, 40, test_rows=19962),
    "LSUN": Pictures(256, 256, 10),
    "Food101": Pictures(512, 512, 101, test_rows=25250),
    "Flowers102": Pictures(500, 600, 102, train_rows=1020, test_rows=6149),
    "OxfordIIITPet": Pictures(500, 375, 37, train_rows=3680, test_rows=3669),
    "Caltech101": Pictures(300, 200, 101, train_rows=8677, test_rows=8677),
    "Caltech256": Pictures(351, 351, 257, train_rows=30607, test_rows=30607),
    "Places365": Pictures(256, 256, 365),
    "StanfordCars": Pictures(600, 400, 196, train_rows=8144, test_rows=8041),
    "DTD": Pictures(500, 450, 47, train_rows=1880, test_rows=1880),
    "GTSRB": Pictures(50, 50, 43, train_rows=26640, test_rows=12630),
    "EuroSAT": Pictures(64, 64, 10, train_rows=27000, test_rows=27000),
    "VOCDetection": Pictures(500, 375, 20, train_rows=5717, test_rows=5823),
    "VOCSegmentation": Pictures(500, 375, 20, train_rows=1464, test_rows=1449),
    "SBDataset": Pictures(500, 375, 20, train_rows=8498, test_rows=2857),
    "Cityscapes": Pictures(2048, 1024, 34, train_rows=2975, test_rows=500),
    "CocoDetection": Pictures(640, 480, 90, train_rows=512, test_rows=512),
    "CocoCaptions": Pictures(640, 480, 90, train_rows=512, test_rows=512),
}
"""Data sets of pictures with one label each; those of `TARGETS` have others. `ImageFolder`: as ImageNet has them, because
that is what it is used for most."""
NAMES = tuple(KINDS)


@when_imported("torchvision.datasets", *(f"{name}.__init__" for name in NAMES))
def find_missing_pictures(original: Function) -> Function:
    """A data set whose files are not here is named in the error, or made up."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _torch.active_fake_mode() is None:
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        except (OSError, RuntimeError, ModuleNotFoundError) as error:
            given = inspect.signature(original).bind(self, *args, **kwargs)
            given.apply_defaults()
            root = given.arguments.get("root")
            if is_made_up():
                return make_pictures(self, given.arguments)
            raise MissingFileError(
                f"torchvision.datasets.{type(self).__name__}: its files are not in {str(root)!r}, and a rehearsal downloads "
                "nothing; put them there, allow the network with --online, or let pictures be made up with --offline-data"
            ) from error

    return __init__


def make_pictures(self: Any, arguments: dict[str, Any]) -> None:
    """Give a data set the state that it has after its files were read."""
    kind = find_kind(type(self))
    name = type(self).__name__
    numpy: Any = importlib.import_module("numpy")
    vision: Any = importlib.import_module("torchvision.datasets.vision")
    self.root = arguments.get("root")
    self.transform, self.target_transform = arguments.get("transform"), arguments.get("target_transform")
    self.train, self.split = arguments.get("train", True), arguments.get("split", "train")
    has_transforms = self.transform is not None or self.target_transform is not None
    self.transforms = (
        vision.StandardTransform(self.transform, self.target_transform)
        if has_transforms
        else arguments.get("transforms")
    )
    split = arguments.get("image_set", self.split)
    is_test = self.train is False or split not in ("train", "trainval")
    rows = kind.test_rows if is_test else kind.train_rows
    labels = [i % kind.classes for i in range(rows)]
    self.classes = [f"class {i}" for i in range(kind.classes)]
    if not isinstance(inspect.getattr_static(type(self), "class_to_idx", None), property):
        self.class_to_idx = {label: i for i, label in enumerate(self.classes)}
    self.targets = self.labels = self._labels = labels
    shape = (rows, kind.height, kind.width) if kind.mode == "L" else (rows, kind.height, kind.width, 3)
    if kind.width <= SMALL:
        self.data = numpy.zeros(shape, dtype="uint8")
        if "MNIST" in name:
            torch: Any = importlib.import_module("torch")
            self.data, self.targets = torch.from_numpy(self.data), torch.from_numpy(numpy.array(labels))
        elif name in ("SVHN", "STL10"):
            self.data, self.labels = self.data.transpose(0, 3, 1, 2), numpy.array(labels)
    if hasattr(type(self), "_load_target"):
        self.coco, self.ids = make_coco(kind, rows), list(range(rows))
    elif (make_target := TARGETS.get(find_kind_name(type(self)))) is not None:
        self.images, self.targets = range(rows), [make_target(self, kind, 0)] * rows
    self.samples = self.imgs = [(f"{i}.jpg", label) for i, label in enumerate(labels)]
    self.made_up = kind
    self.made_up_rows = rows
    note_made_up(
        name,
        f"torchvision.datasets.{name}: not on this machine; {rows:,} pictures of {kind.width}x{kind.height} were made up",
    )


SMALL = 96
"""Pictures of up to this width are kept as one array by torchvision."""


def find_kind_name(cls: type) -> str:
    """The name of the class, or of its first base that is known."""
    return next(base.__name__ for base in cls.__mro__ if base.__name__ in KINDS)


def find_kind(cls: type) -> Pictures:
    return KINDS[find_kind_name(cls)]


# --- targets that are not one label ----------------------------------------------------------------------------------


def list_boxes(kind: Pictures) -> list[tuple[int, int, int, int, int]]:
    """x, y, width, height and class of the objects of a picture."""
    width, height = kind.width // 3, kind.height // 3
    return [
        (i * width // BOXES, i * height // BOXES, width, height, i % kind.classes + 1) for i in range(BOXES)
    ]


def make_voc_annotation(self: Any, kind: Pictures, index: int) -> dict[str, Any]:
    """As the XML files of Pascal VOC are read."""
    names = (
        "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
        "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
    )  # fmt: skip
    objects = [
        {
            "name": names[label - 1],
            "pose": "Unspecified",
            "truncated": "0",
            "difficult": "0",
            "bndbox": {"xmin": str(x), "ymin": str(y), "xmax": str(x + width), "ymax": str(y + height)},
        }
        for x, y, width, height, label in list_boxes(kind)
    ]
    size = {"width": str(kind.width), "height": str(kind.height), "depth": "3"}
    annotation = {"folder": "VOC", "filename": f"{index}.jpg", "size": size, "segmented": "0"}
    return {"annotation": {**annotation, "object": objects}}


def make_mask(self: Any, kind: Pictures, index: int) -> Any:
    """A class for each point."""
    return make_image(index % kind.classes, str(kind.width), str(kind.height), "L")


def make_city_targets(self: Any, kind: Pictures, index: int) -> Any:
    """Cityscapes has a target for each `target_type`."""
    kinds = [self.target_type] if isinstance(self.target_type, str) else self.target_type
    targets = [{} if name == "polygon" else make_mask(self, kind, index) for name in kinds]
    return tuple(targets) if len(targets) > 1 else targets[0]


def make_coco(kind: Pictures, rows: int) -> Any:
    """An index of pycocotools, with boxes and outlines on each picture."""
    coco: Any = importlib.import_module("pycocotools.coco").COCO()
    annotations: list[dict[str, Any]] = []
    for image in range(rows):
        for x, y, width, height, label in list_boxes(kind):
            right, bottom = x + width, y + height
            annotation = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "iscrowd": 0}
            outline = [[x, y, right, y, right, bottom, x, bottom]]
            box = {"bbox": [x, y, width, height], "area": width * height, "segmentation": outline}
            annotations.append({**annotation, **box, "caption": "a small house by the sea"})
    size = {"width": kind.width, "height": kind.height}
    coco.dataset = {
        "info": {},
        "images": [{"id": i, "file_name": f"{i}.jpg", **size} for i in range(rows)],
        "annotations": annotations,
        "categories": [{"id": i + 1, "name": f"class {i}"} for i in range(kind.classes)],
    }
    coco.createIndex()
    return coco


def load_coco_target(self: Any, kind: Pictures, index: int) -> Any:
    return self._load_target(self.ids[index])


TARGETS: dict[str, Callable[[Any, Pictures, int], Any]] = {
    "VOCDetection": make_voc_annotation,
    "VOCSegmentation": make_mask,
    "SBDataset": make_mask,
    "Cityscapes": make_city_targets,
    "CocoDetection": load_coco_target,
    "CocoCaptions": load_coco_target,
}
"""By the name of the data set."""


@when_imported("torchvision.datasets", *(f"{name}.__getitem__" for name in NAMES))
def read_made_up_picture(original: Function) -> Function:
    """A picture and its label, as the data set's transforms give them."""

    def __getitem__(self: Any, index: int) -> Any:
        kind: Pictures | None = vars(self).get("made_up")
        if kind is None:
            return original(self, index)
        index = operator.index(index)  # samplers give numbers of numpy and torch, too
        if not 0 <= index < self.made_up_rows:
            raise IndexError(f"index {index} is out of range for {self.made_up_rows} made-up pictures")
        picture: Any = make_image(index, str(kind.width), str(kind.height), kind.mode)
        make_target = TARGETS.get(find_kind_name(type(self)))
        if make_target is not None:
            target = make_target(self, kind, index)
            return (picture, target) if self.transforms is None else self.transforms(picture, target)
        label: Any = index % kind.classes
        picture = picture if self.transform is None else self.transform(picture)
        return picture, label if self.target_transform is None else self.target_transform(label)

    return __getitem__


@when_imported("torchvision.datasets", *(f"{name}.__len__" for name in NAMES))
def count_made_up_pictures(original: Function) -> Function:
    """The number of made-up pictures."""
    return lambda self: self.made_up_rows if "made_up" in vars(self) else original(self)
