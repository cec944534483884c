"""How a module is cut into units, and what is refused."""

import pytest
import torch
from torch import nn

from onecurve.errors import InputError
from onecurve.model import GPT
from onecurve.parallel.units import ROOT, default_units, extras, survey


class Mixed(nn.Module):
    """Containers within containers, parameters on the root, in lists, shared by two units."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(3, 3)
        self.groups = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(3, 3)}), nn.Sequential(nn.Linear(3, 3), nn.ReLU())])
        self.loose = nn.ParameterList([nn.Parameter(torch.zeros(2))])
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight


def names(units):
    return [name for name, _ in units]


def test_containers_are_opened_because_nobody_calls_them():
    assert names(default_units(Mixed())) == ["first", "groups.0.a", "groups.1.0", "groups.1.1", "last"]


def test_a_models_own_units_count():
    model = GPT(layers=2, width=8, heads=2, vocab=8, context=4)
    assert names(default_units(model)) == ["embedding", "blocks.0", "blocks.1", "head"]


def test_what_no_unit_holds_belongs_to_the_root():
    found = survey(Mixed(), None)
    unit_of = {spec.name: spec.unit for spec in found.specs}
    assert unit_of["scale"] == unit_of["loose.0"] == ROOT
    assert found.needs[ROOT] == [ROOT]
    assert unit_of["first.weight"] == "first" and "last.weight" not in unit_of
    assert found.needs["last"] == ["first", "last"]  # it reads the weight that the first unit holds
    assert found.needs["groups.1.1"] == []


def test_a_bare_layer_is_one_unit():
    found = survey(nn.Linear(2, 2), None)
    assert [spec.unit for spec in found.specs] == [ROOT, ROOT] and found.needs == {ROOT: [ROOT]}


def test_tied_uses_are_two_gradient_leaves_of_one_parameter():
    found = survey(GPT(layers=1, width=8, heads=2, vocab=8, context=4, tied=True), None)
    assert "head.weight" not in found.parameters and set(found.tied) == {"head.weight"}
    assert found.unit_of_use["head.weight"] == "head" and found.unit_of_use["embedding.token"] == "embedding"
    assert len(found.leaves) == len(found.parameters) + 1


def test_matrices_decay_but_what_the_model_excepts():
    found = survey(GPT(layers=1, width=8, heads=2, vocab=8, context=4), None)
    decays = {spec.name: spec.decay for spec in found.specs}
    assert decays["blocks.0.attention.qkv"] and decays["head.weight"]
    assert (
        not decays["embedding.position"] and not decays["blocks.0.norm1.weight"] and not decays["blocks.0.mlp.up.bias"]
    )


def test_refusals_name_the_thing():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train"):
        survey(frozen, None)
    with pytest.raises(InputError, match=r"weight is torch\.float64"):
        survey(nn.Linear(2, 2).double(), None)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(InputError, match="two have one name"):
        survey(model, [("x", model[0]), ("x", model[1])])


def test_extras_are_frozen_parameters_and_persistent_buffers():
    model = nn.Module()
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.trained = nn.Parameter(torch.ones(2))
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert set(extras(model)) == {"frozen", "kept"}
