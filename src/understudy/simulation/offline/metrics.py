"""`evaluate.load` of a metric that is not here: made-up scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.simulation.libraries import when_imported
from understudy.simulation.offline.switch import is_made_up
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]
SCORES = (
    "accuracy f1 precision recall matthews_correlation pearson spearmanr exact_match wer cer bleu score rouge1 rouge2 "
    "rougeL rougeLsum mean_iou mean_accuracy overall_accuracy overall_precision overall_recall overall_f1 perplexity mse"
).split()


class MadeUpMetric:
    """As `evaluate.EvaluationModule`: takes any predictions, and gives 0.5 for every score."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, *args: object, **kwargs: object) -> None:
        """Predictions are not kept."""

    add_batch = add

    def compute(self, *args: object, **kwargs: object) -> dict[str, float]:
        return {**dict.fromkeys(SCORES, 0.5), self.name: 0.5}


@when_imported("evaluate", "load", "combine")
def find_missing_metrics(original: Function) -> Function:
    """A metric that is not here is made up."""

    def load(name: Any, *args: object, **kwargs: object) -> Any:
        try:
            return original(name, *args, **kwargs)
        except (OSError, ModuleNotFoundError, ImportError):
            if not is_made_up():
                raise
            add_note(f"evaluate.load({str(name)!r}): not on this machine; every score is 0.5")
            return MadeUpMetric(str(name))

    return load
