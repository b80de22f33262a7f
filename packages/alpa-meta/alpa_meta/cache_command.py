"""The command `alpa cache`: what the plans of earlier searches take, and away with them."""

from __future__ import annotations

from typing import Annotated

import typer


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all plans.")] = False,
) -> None:
    """Say where plans of earlier searches are kept.

    And how many they are and how large. ALPA_PLAN_CACHE=0 in the environment keeps none.
    """
    from alpa_meta.planning.plan_store import MAX_BYTES, PlanStore, plan_directory

    store = PlanStore(plan_directory())
    sizes = store.sizes()
    verb = "removed" if clear else "holds"
    if clear:
        store.clear()
    typer.echo(
        f"{store.folder}: {verb} {len(sizes)} plans, {sum(sizes) / 2**20:.1f} of at most "
        f"{MAX_BYTES >> 20} MiB"
    )
