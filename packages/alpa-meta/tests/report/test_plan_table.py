from io import StringIO

from attrs import evolve
from rich.console import Console

from alpa_interchange.amounts import format_bytes
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


def test_memory_is_that_of_all_stages_of_a_device(make_plan):
    plan = make_plan(2, 4)
    of_stage = format_bytes(max(one.peak_bytes for one in plan.shardings))
    assert f"at most {of_stage} per device" in plan_summary(plan)
    stage_plan = evolve(plan.stage_plan, device_bytes=(2.0**31, 2.0**31))
    shared = evolve(plan, stage_plan=stage_plan)
    assert "at most 2 GiB per device" in plan_summary(shared)
    text = _shown(shared)
    assert "all stages" in text and of_stage in text
    assert text.count("2 GiB") == 1 + 2 * 2  # the line, and both stages in both tables


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
