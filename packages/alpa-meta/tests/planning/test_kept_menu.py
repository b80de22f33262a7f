"""Menus kept beside plans."""

from layered_plan import LAYERS, lowered

from alpa_interchange import KeptMenu, from_json
from alpa_meta.planning.plan_store import PlanStore


def test_it_says_how_every_array_of_the_state_lies():
    menu = lowered(num_stages=2).menu
    assert len(menu.leaves) == 4 * LAYERS  # two matrices and their momentum
    assert {leaf.layer for leaf in menu.leaves} == set(range(LAYERS))
    keys = {(one.mesh, one.key) for one in menu.state}
    for number, mesh in enumerate(menu.menu.meshes):
        for rows in mesh.rows:
            assert all((number, row.key) in keys for row in rows)


def test_layers_that_the_menu_was_not_made_from_have_their_arrays_too():
    menu = lowered(256, layers=8, num_stages=2).menu
    assert menu.menu.num_layers == 8
    assert [leaf.layer for leaf in menu.leaves] == sorted(4 * list(range(8)))
    assert len({leaf.path for leaf in menu.leaves}) == 32


def test_the_cache_keeps_the_menu_with_its_plan_and_drops_them_together(tmp_path):
    found = lowered(num_stages=2)
    store = PlanStore(tmp_path)
    store.save("one", found.plan, found.menu)
    assert len(store.sizes()) == 1
    kept = store.menu("one")
    assert kept is not None and from_json(kept.read_text(), KeptMenu) == found.menu
    assert store.menu("two") is None
    store.clear()
    assert not list(tmp_path.iterdir())
