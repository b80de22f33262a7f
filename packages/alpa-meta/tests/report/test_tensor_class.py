from alpa_interchange import ShardingSpec
from alpa_meta.report.tensor_class import classify_activations, classify_tensors

ROWS = ShardingSpec((("x",), ()))
WHOLE = ShardingSpec(((), ()))


def _tensors(*paths):
    return [(path, (8, 4), "float32") for path in paths]


def test_optimiser_state_stands_beside_its_parameter():
    paths = ("state.params['w']", "state.opt_state[1][0].mu['w']", "state.opt_state[1][0].nu['w']")
    (found,) = classify_tensors(_tensors(*paths), dict.fromkeys(paths, ROWS))
    assert found.name == "w"
    assert found.members == ("params", "mu", "nu")
    assert found.count == 3
    assert found.spec == ROWS


def test_repeated_layers_are_one_class():
    paths = [
        f"state{container}['layer_{number}']['up']['kernel']"
        for container in (".params", ".opt_state[0].mu")
        for number in range(4)
    ]
    (found,) = classify_tensors(_tensors(*paths), dict.fromkeys(paths, ROWS))
    assert found.name == "layer_{0-3}.up.kernel"
    assert found.members == ("params", "mu")
    assert found.count == 8


def test_another_spec_makes_another_class():
    specs = {"state.params['w']": WHOLE, "state.opt_state[0].mu['w']": ROWS}
    first, second = classify_tensors(_tensors(*specs), specs)
    assert (first.members, first.spec) == (("params",), WHOLE)
    assert (second.members, second.spec) == (("mu",), ROWS)


def test_layers_without_optimiser_state_keep_their_whole_path():
    paths = [f"state['params']['layer_{number}']['w']" for number in (0, 1, 3)]
    (found,) = classify_tensors(_tensors(*paths), dict.fromkeys(paths, ROWS))
    assert found.name == "params.layer_{0,1,3}.w"
    assert found.members == ("state",)


def test_a_step_counter_is_named_as_it_is():
    (found,) = classify_tensors([("state.step", (), "int32")], {"state.step": ShardingSpec(())})
    assert found.name == "step"


def test_activations_of_repeated_layers_are_one_class():
    specs = {f"Gpt/layer_{number}/up dot_general[8,64]": ROWS for number in range(3)}
    specs["Gpt/head dot_general[8,256]"] = WHOLE
    assert classify_activations(specs) == (
        ("Gpt/layer_{0-2}/up dot_general[8,64]", ROWS, 3),
        ("Gpt/head dot_general[8,256]", WHOLE, 1),
    )
