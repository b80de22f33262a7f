"""A corpus of real training steps: the programs every rule, plan and audit is tested on.

`build(name, size)` returns one `CorpusModel`: an ordinary single-device step
(`jax.value_and_grad` and optax) with the shapes of its state and batch and functions that make
them. `NAMES` lists the models, `SIZES` the sizes each of them has. `published(name)` returns a
model of a paper (`alpa_meta.published_models`), to be planned.
"""

from alpa_meta.corpus.catalogue import NAMES, build, published
from alpa_meta.corpus.model import SIZES, CorpusModel

__all__ = ["NAMES", "SIZES", "CorpusModel", "build", "published"]
