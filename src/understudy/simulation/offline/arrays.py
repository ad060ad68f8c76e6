"""Data sets that `keras` and `scikit-learn` download as arrays, where they are not on this machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from understudy import _torch
from understudy.simulation.libraries import MissingFileError, when_imported
from understudy.simulation.offline.switch import is_made_up, note_made_up

Function = Callable[..., Any]

PICTURES = {
    "mnist": (60_000, 10_000, (28, 28), 10),
    "fashion_mnist": (60_000, 10_000, (28, 28), 10),
    "cifar10": (50_000, 10_000, (32, 32, 3), 10),
    "cifar100": (50_000, 10_000, (32, 32, 3), 100),
}
"""Keras: rows for training, rows for tests, the shape of a picture, classes."""
TEXTS = {"imdb": (25_000, 25_000, 2), "reuters": (8_982, 2_246, 46)}
"""Keras: rows for training, rows for tests, classes."""
WORDS_OF_TEXT = 240
TABLES = {"california_housing": (16_512, 4_128, 8), "boston_housing": (404, 102, 13)}
"""Keras: rows for training, rows for tests, columns."""
FETCHED = {
    "fetch_california_housing": (20_640, 8, 0),
    "fetch_covtype": (581_012, 54, 7),
    "fetch_olivetti_faces": (400, 4_096, 40),
    "fetch_kddcup99": (494_021, 41, 23),
}
"""Scikit-learn: rows, columns, classes (0: a number is predicted)."""
OPENML = {"mnist_784": (70_000, 784, 10), "Fashion-MNIST": (70_000, 784, 10)}
"""By name, in `fetch_openml`."""


def make_up(name: str, original: Function, make: Function, args: Any, kwargs: Any) -> Any:
    """What the library finds; made up if it can't be reached and `--offline-data` is given."""
    try:
        return original(*args, **kwargs)
    except Exception as error:
        # keras wraps what its download raised in an Exception of no other class.
        if _torch.active_fake_mode() is None or not (isinstance(error, OSError) or "URL fetch" in str(error)):
            raise
        if is_made_up():
            note_made_up(name, f"{name}: not on this machine; arrays of its shapes were made up")
            return make()
        raise MissingFileError(
            f"{name}: the data set is not on this machine, and a rehearsal downloads nothing; put its file into the "
            "library's cache, allow the network with --online, or let it be made up with --offline-data"
        ) from error


def _numpy() -> Any:
    return importlib.import_module("numpy")


@when_imported("keras.src.datasets.mnist", "load_data")
@when_imported("keras.src.datasets.fashion_mnist", "load_data")
@when_imported("keras.src.datasets.cifar10", "load_data")
@when_imported("keras.src.datasets.cifar100", "load_data")
@when_imported("keras.src.datasets.imdb", "load_data")
@when_imported("keras.src.datasets.reuters", "load_data")
@when_imported("keras.src.datasets.california_housing", "load_data")
@when_imported("keras.src.datasets.boston_housing", "load_data")
def find_missing_arrays(original: Function) -> Function:
    """A data set of keras that is not here is named in the error, or made up."""
    name = original.__module__.rpartition(".")[2]

    def load_data(*args: Any, **kwargs: Any) -> Any:
        return make_up(
            f"keras.datasets.{name}", original, lambda: make_keras_data(name, **kwargs), args, kwargs
        )

    return load_data


def make_keras_data(name: str, num_words: int | None = None, **options: Any) -> Any:
    """((x, y), (x, y)) for training and tests."""
    np = _numpy()
    if name in PICTURES:
        *rows, shape, classes = PICTURES[name]
        labels = (np.arange(n, dtype="uint8") % classes for n in rows)
        of_label = (-1, 1) if name.startswith("cifar") else (-1,)
        return tuple((np.zeros((len(y), *shape), "uint8"), y.reshape(of_label)) for y in labels)
    if name in TEXTS:
        *rows, classes = TEXTS[name]
        length = min(options.get("maxlen") or WORDS_OF_TEXT, WORDS_OF_TEXT)
        text = [1 + i % ((num_words or 10_000) - 1) for i in range(length)]
        return tuple((_list_texts(text, n), np.arange(n) % classes) for n in rows)
    *rows, columns = TABLES[name]
    return tuple((np.ones((n, columns), "float32"), np.ones(n, "float32")) for n in rows)


def _list_texts(text: list[int], rows: int) -> Any:
    texts = _numpy().empty(rows, dtype=object)
    for row in range(rows):
        texts[row] = list(text)
    return texts


@when_imported("sklearn.datasets", *FETCHED, "fetch_openml")
def find_missing_tables(original: Function) -> Function:
    """A data set of scikit-learn that is not here is named in the error, or made up."""

    def fetch(*args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        sizes = FETCHED.get(name) or OPENML.get(str(args[0] if args else kwargs.get("name")))
        if sizes is None:
            return original(*args, **kwargs)
        return make_up(
            f"sklearn.datasets.{name}", original, lambda: make_table(*sizes, **kwargs), args, kwargs
        )

    return fetch


def make_table(rows: int, columns: int, classes: int, return_X_y: bool = False, **options: Any) -> Any:
    """As scikit-learn gives it: a `Bunch`, or rows and what is predicted of them."""
    np = _numpy()
    data = np.ones((rows, columns))
    target = np.arange(rows) % classes if classes else np.ones(rows)
    if return_X_y:
        return data, target
    names = [f"column {i}" for i in range(columns)]
    bunch: Any = importlib.import_module("sklearn.utils").Bunch
    return bunch(data=data, target=target, feature_names=names, target_names=["target"], DESCR="made up")
