"""What only parts of the package need: the extra of alpa-meta that brings each module."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

EXTRA_OF: Mapping[str, str] = MappingProxyType(
    {
        "equinox": "corpus",
        "flax": "train",
        "matplotlib": "report",
        "optax": "train",
        "ray": "ray",
        "orbax.checkpoint": "checkpoint",
        "rich": "report",
        "tensorstore": "checkpoint",
        "typer": "cli",
    }
)


class MissingExtraError(ImportError):
    """A module of an extra is not installed; the message names the extra."""


def missing(module: str, what: str) -> MissingExtraError:
    """Return the error that says how to install a module that `what` needs."""
    return MissingExtraError(
        f"{what} needs {module}, which is not installed; it comes with an extra: "
        f"pip install 'alpa-meta[{EXTRA_OF[module]}]' (alpa-meta[all] has everything)",
        name=module,
    )


def named(error: ModuleNotFoundError, what: str) -> ImportError:
    """Return the error that names the extra of the module that was not found, if it is of one."""
    name = error.name or ""
    return missing(name, what) if name in EXTRA_OF else error


def require(what: str, *modules: str) -> None:
    """Raise MissingExtraError unless all modules can be imported."""
    for module in modules:
        if find_spec(module) is None:
            raise missing(module, what)
