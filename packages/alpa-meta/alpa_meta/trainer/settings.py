"""Everything a training run is a function of, and its JSON form in checkpoints."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge
from cattrs import Converter
from cattrs.v import transform_error

from alpa_meta.checkpoints.manifest import CheckpointError
from alpa_meta.trainer.model import GptOptions
from alpa_meta.trainer.step import OptimiserOptions
from alpa_meta.types import Fields

_CONVERTER = Converter(forbid_extra_keys=True)


@frozen(kw_only=True)
class TrainSettings:
    """Model, optimiser, data and seed of a run. How it is parallelised is not part of it."""

    model: GptOptions = GptOptions()
    optimiser: OptimiserOptions = OptimiserOptions()
    batch_size: int = field(default=16, validator=ge(1))  # windows per step
    seed: int = field(default=0, validator=ge(0))
    max_train_bytes: int = field(default=3_000_000, validator=ge(1))

    @property
    def tokens_per_step(self) -> int:
        """Return the bytes predicted in one step."""
        return self.batch_size * self.model.context


def settings_to_json(settings: TrainSettings) -> Fields:
    """Return `settings` as JSON values."""
    data: dict[str, object] = _CONVERTER.unstructure(settings)
    return data


def settings_from_json(data: object, source: str) -> TrainSettings:
    """Return the settings written by `settings_to_json`; CheckpointError names what is wrong."""
    try:
        return _CONVERTER.structure(data, TrainSettings)
    except Exception as error:
        reasons = "; ".join(transform_error(error, path="settings")[:3])
        raise CheckpointError(f"{source}: its settings are not those of a run: {reasons}") from None
