"""The versions of this package and its siblings, which belong together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "alpa-meta",
    "alpa-interchange",
    "cost-model",
    "ilp-sharding",
    "mesh-runtime",
    "resharding",
    "stage-dp",
)


def installed_versions() -> dict[str, str]:
    """Return the version of each package that is installed as a distribution."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from its sources
            continue
    return found


def check_versions(found: dict[str, str] | None = None) -> None:
    """Raise ImportError unless all packages are of one release (the same first two numbers)."""
    found = installed_versions() if found is None else found
    releases = {name: number.split(".")[:2] for name, number in found.items()}
    ours = releases.get("alpa-meta")
    if ours is None:
        return
    strangers = [f"{name} {found[name]}" for name, one in releases.items() if one != ours]
    if strangers:
        raise ImportError(
            f"alpa-meta {found['alpa-meta']} works with packages of its own release, "
            f"{'.'.join(ours)}, but installed are {', '.join(strangers)}; install all wheels of "
            "one `uv build --all-packages`"
        )
