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
    assert len(found.gradients_of) == len(found.parameters) + 1


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


class Tied(nn.Module):
    """Two parameters over one storage, as GPT's tied embeddings are."""

    def __init__(self, tied_uses):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, 2))
        self.b = nn.Parameter(self.a.detach())
        self.c = nn.Parameter(torch.ones(2))
        self.tied_uses = tied_uses


def test_parameters_over_one_memory_must_be_declared():
    with pytest.raises(InputError, match="parameters a and b share memory"):
        survey(Tied({}), None)
    overlapping = Tied({"b": "a"})
    overlapping.c = nn.Parameter(overlapping.a.detach().t()[1])  # a strided view of a part
    with pytest.raises(InputError, match="parameters a and c share memory"):
        survey(overlapping, None)
    assert set(survey(Tied({"b": "a"}), None).tied) == {"b"}


@pytest.mark.parametrize(("frozen", "trained"), [("a", "b"), ("b", "a")])
def test_a_tied_pair_is_frozen_whole_or_not_at_all(frozen, trained):
    model = Tied({"b": "a"})
    getattr(model, frozen).requires_grad_(False)
    with pytest.raises(InputError, match=f"{frozen} is frozen and tied to {trained}"):
        survey(model, None)
    getattr(model, trained).requires_grad_(False)
    found = survey(model, None)
    assert set(found.parameters) == {"c"} and not found.tied


def test_a_tied_use_that_does_not_exist_is_named():
    with pytest.raises(InputError, match="no parameter z"):
        survey(Tied({"z": "a"}), None)


def test_attributes_called_units_are_no_methods():
    model = nn.Sequential(nn.Linear(2, 2))
    type(model).units, type(model).undecayed = 64, ["x"]
    try:
        assert [spec.name for spec in survey(model, None).specs] == ["0.weight", "0.bias"]
    finally:
        del type(model).units, type(model).undecayed


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Dropout(0.1), "0 is a Dropout with dropout 0.1"),
        (nn.Dropout2d(0.5), "Dropout2d"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "MultiheadAttention with dropout 0.1"),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.2), "LSTM with dropout 0.2"),
        (nn.BatchNorm1d(2), "BatchNorm1d: its running statistics"),
    ],
)
def test_layers_whose_result_depends_on_the_rank_are_refused(layer, words):
    with pytest.raises(InputError, match=words):
        survey(nn.Sequential(layer, nn.Linear(2, 2)), None)
    survey(nn.Sequential(layer.eval(), nn.Linear(2, 2)), None)
    harmless = [nn.Dropout(0.0), nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2)]
    survey(nn.Sequential(*harmless), None)


def test_extras_are_frozen_parameters_and_persistent_buffers():
    model = nn.Module()
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.trained = nn.Parameter(torch.ones(2))
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert set(extras(model)) == {"frozen", "kept"}
