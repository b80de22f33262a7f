"""The bundled training job: a byte-level GPT on the standard library's source, with checkpoints."""

from alpa_meta.extras import named

try:
    from alpa_meta.trainer.checkpoint import (
        Checkpoint,
        CheckpointError,
        read_checkpoint,
        restore_state,
        save_checkpoint,
    )
    from alpa_meta.trainer.model import Gpt, GptOptions
    from alpa_meta.trainer.settings import TrainSettings
    from alpa_meta.trainer.step import (
        OptimiserOptions,
        make_optimiser,
        make_state_maker,
        train_step,
    )
    from alpa_meta.trainer.text import Text, read_text
except ModuleNotFoundError as error:
    raise named(error, "alpa_meta.trainer") from None

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Gpt",
    "GptOptions",
    "OptimiserOptions",
    "Text",
    "TrainSettings",
    "make_optimiser",
    "make_state_maker",
    "read_checkpoint",
    "read_text",
    "restore_state",
    "save_checkpoint",
    "train_step",
]
