"""Newer schemas are refused by name; older ones are read, and verified by their own rules."""

import hashlib

import pytest

from onecurve.checkpoint import latest_checkpoint, load_checkpoint, read_manifest, state_digest, verify_checkpoint
from onecurve.checkpoint import manifest as manifest_module
from onecurve.checkpoint.errors import DamagedCheckpoint, NewerCheckpoint
from onecurve.checkpoint.read import digest_of_files
from tests.checkpoint.fakes import all_good, make, on_ranks
from tests.checkpoint.test_damage import FILES, refused, rewrite


def test_a_newer_schema_is_refused_by_name_and_an_older_one_read(two, monkeypatch):
    folder, path, _ = two
    rewrite(path, lambda raw: raw.update(schema=3))
    with pytest.raises(NewerCheckpoint, match="schema 3 is newer than 2"):
        read_manifest(path)
    assert latest_checkpoint(folder)[0] == folder / "step-00000010"
    monkeypatch.setattr(manifest_module, "SCHEMA", 4)
    upgrades = {2: lambda raw: raw | {"schema": 3}, 3: lambda raw: raw | {"schema": 4, "guard": {"from": 3}}}
    monkeypatch.setattr(manifest_module, "UPGRADES", upgrades)
    assert read_manifest(path).guard == read_manifest(folder / "step-00000010").guard == {"from": 3}


def as_schema_1(path):
    """Turn a checkpoint into what schema 1 would have been: sha256 chunks, and no field that says so."""
    old = read_manifest(path).model_copy(update={"chunk_hash": "sha256"})

    def change(raw):
        del raw["chunk_hash"]
        raw.update(schema=1, state_digest=digest_of_files(path, old))

    rewrite(path, change)


def test_schema_1_is_verified_and_loaded_with_its_own_leaves(two):
    folder, path, parameters = two
    digest = read_manifest(path).state_digest
    as_schema_1(path)
    old = read_manifest(path)
    assert old.state_digest != digest and verify_checkpoint(path) == []
    assert latest_checkpoint(folder) == (path, [])

    def work(mesh):
        optimizer = make(mesh, parameters=parameters)
        assert load_checkpoint(path, optimizer).state_digest == old.state_digest
        assert state_digest(optimizer) == digest  # a live state's is of today's kind

    all_good(on_ranks(3, work))
    # the claim that its leaves are of today's kind does not hold
    rewrite(path, lambda raw: raw.update(schema=2, chunk_hash="blake3"))
    assert "state digest" in verify_checkpoint(path)[0]


def test_a_bit_flipped_in_schema_1_is_caught(two):
    folder, path, parameters = two
    as_schema_1(path)
    data = bytearray((path / FILES[2]).read_bytes())
    data[-1] ^= 1
    (path / FILES[2]).write_bytes(data)
    refused(folder, parameters, [FILES[2]])
    # also with a file hash that was made to fit: then only the state digest stands in between
    rewrite(path, lambda raw: raw["files"][2].update(sha256=hashlib.sha256(data).hexdigest()))
    refused_load = on_ranks(2, lambda mesh: load_checkpoint(path, make(mesh, parameters=parameters)))
    assert all(isinstance(e, DamagedCheckpoint) and "state digest" in str(e) for e in refused_load)
