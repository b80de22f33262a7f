from io import StringIO

from attrs import evolve
from rich.console import Console

from alpa_meta.report.plan_table import plan_summary, print_plan


def _shown(plan, **options):
    output = StringIO()
    console = Console(file=output, width=140)
    print_plan(plan, console, **options)
    return output.getvalue()


def test_the_tables_say_everything_the_plan_decides(make_plan):
    text = _shown(make_plan(2, 4))
    for expected in (
        "2 stages, 4 microbatches, schedule 1f1b",
        "predicted: 20 ms per step",
        "gap 11.1 %",
        "x 2 x y 2",
        "4-7",
        "layer_1.w",
        "params, mu",
        "64 x 128",
        "(x, y)",
        "32 x 64",
        "hidden",
        "activation",
        "parameters",
    ):
        assert expected in text, expected


def test_what_is_recomputed_is_said(make_plan):
    plan = make_plan(2, 4)
    assert "recomputed" not in plan_summary(plan)
    first, second = plan.layers
    some = evolve(plan, layers=(evolve(first, recomputation="full"), second))
    assert "schedule 1f1b, layer 0 recomputed in full\n" in plan_summary(some)
    every = [evolve(layer, recomputation="selective") for layer in plan.layers]
    assert "every layer recomputed selectively\n" in plan_summary(evolve(plan, layers=every))


def test_every_parameter_is_listed_when_asked_for(make_plan):
    text = _shown(make_plan(1, 1), every_parameter=True)
    assert "state.params['layer_0']['w']" in text
    assert "state.opt_state[0].mu['layer_0']['w']" in text
