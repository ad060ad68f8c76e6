"""Image processors and feature extractors of transformers that are not here: those of the model's type, by its
configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.simulation.libraries import when_imported
from understudy.simulation.offline.models import HUB_OPTIONS, find_configuration
from understudy.simulation.offline.switch import is_made_up
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]


@when_imported("transformers.image_processing_base", "ImageProcessingMixin.get_image_processor_dict")
@when_imported("transformers.feature_extraction_utils", "FeatureExtractionMixin.get_feature_extractor_dict")
@when_imported("transformers.processing_utils", "ProcessorMixin.get_processor_dict")
@when_imported("transformers.video_processing_utils", "BaseVideoProcessor.get_video_processor_dict")
def find_missing_processor(original: Function) -> Any:
    """With `--offline-data`: the defaults of the class, in the model's image size."""
    plain = getattr(original, "__func__", original)

    def get_dict(cls: object, /, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        try:
            return plain(cls, name, **kwargs)
        except (OSError, ValueError):
            configuration = find_configuration(name) if is_made_up() else None
            if configuration is None:
                raise
            add_note(
                f"{str(name)!r}: its preprocessor is not on this machine; one of the model's type was made up"
            )
            unused = {key: value for key, value in kwargs.items() if key not in HUB_OPTIONS}
            size = configuration.get("image_size")
            return ({"size": {"height": size, "width": size}} if isinstance(size, int) else {}), unused

    return classmethod(get_dict)
