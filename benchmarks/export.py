"""export beside torch.export: training dialect, and core ATen after `run_decompositions`, static and dynamic.

    python -m benchmarks.export [--quick] [--layers N] [--onnx] [models]

`--onnx`: `torch.onnx.export` from model to ONNX program, by itself and inside of `accelerate_export`.

One process, processor time, the least of a few runs, models of `transformers` by turns.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import understudy
from tests.exporting.models import small_model
from tests.exporting.test_models import MODELS, fixed_of, inputs_of, what_varies


def least(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def measure(name: str, layers: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Title → seconds of torch and of ours."""
    model: Any = small_model(name, layers=layers)
    inputs = inputs_of(model, 2, 8)
    fixed, dynamic = fixed_of(model), what_varies(model)
    table = torch.export.default_decompositions()
    found = {}
    for title, shapes in (("static", None), ("dynamic", dynamic)):
        kwargs = {**inputs, **fixed}

        def theirs(decomposed: bool, kwargs: Any = kwargs, shapes: Any = shapes) -> Any:
            program = torch.export.export(model, (), kwargs, dynamic_shapes=shapes, strict=False)
            return program.run_decompositions() if decomposed else program

        def ours(decomposed: bool, kwargs: Any = kwargs, shapes: Any = shapes) -> Any:
            return understudy.export(
                model, (), kwargs, dynamic_shapes=shapes, decompositions=table if decomposed else None
            )

        for dialect, decomposed in (("training", False), ("core ATen", True)):
            try:
                slow = least(functools.partial(theirs, decomposed), max(1, repeats // 2))
            except Exception as error:  # torch's decomposition of some models raises
                print(f"  torch: {name}, {title}, {dialect}: {type(error).__name__}")
                continue
            found[f"{dialect}, {title}"] = slow, least(functools.partial(ours, decomposed), repeats)
    return found


def measure_onnx(name: str, layers: int, repeats: int) -> dict[str, tuple[float, float]]:
    """The same for `torch.onnx.export` with dynamic sizes."""
    model: Any = small_model(name, layers=layers)
    kwargs, asked = {**inputs_of(model, 2, 8), **fixed_of(model)}, what_varies(model)

    def convert() -> Any:
        return torch.onnx.export(model, (), kwargs=kwargs, dynamo=True, dynamic_shapes=asked, verbose=False)

    def convert_quickly() -> Any:
        with understudy.accelerate_export():
            return convert()

    convert_quickly()
    return {
        "torch.onnx.export": (
            least(convert, max(1, repeats // 2)),
            least(convert_quickly, max(1, repeats // 2)),
        )
    }


def warm_up() -> None:
    """Both import what they need, and torch's table of decompositions is made."""
    model, args = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)), (torch.randn(3, 4),)
    torch.export.export(model, args).run_decompositions()
    understudy.export(model, args).run_decompositions()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three models, one or two runs each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--onnx", action="store_true", help="torch.onnx.export of GPT-2 and BERT, or of the given models"
    )
    parser.add_argument("models", nargs="*")
    options = parser.parse_args()
    names = options.models or (("gpt2", "bert") if options.onnx else MODELS[:3] if options.quick else MODELS)
    ratios: dict[str, list[float]] = {}
    warm_up()
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = (measure_onnx if options.onnx else measure)(
                name, options.layers, 2 if options.quick else 4
            )
        shown = []
        for title, (slow, quick) in found.items():
            ratios.setdefault(title, []).append(slow / quick)
            shown.append(f"{title}: {slow:.2f} s / {quick:.3f} s = {slow / quick:.1f}×")
        print(f"{name:12} " + "; ".join(shown), flush=True)
    for title, each in ratios.items():
        mean = math.exp(sum(map(math.log, each)) / len(each))
        print(f"{title:20} geometric mean {mean:.1f}×, least {min(each):.1f}×, {len(each)} models")


if __name__ == "__main__":
    main()
