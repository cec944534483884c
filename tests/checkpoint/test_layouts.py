"""Any checkpoint into any layout: bytes, digest, and how much is read."""

import hashlib
import itertools

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from onecurve.checkpoint import load_checkpoint, read_parameters, save_checkpoint, state_digest, verify_checkpoint
from onecurve.checkpoint.manifest import KINDS, canonical_json
from onecurve.checkpoint.read import digest_of_files, read_manifest
from tests.checkpoint.fakes import PARAMETERS, all_good, make, on_ranks, whole_state

LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 3), (3, 3), (2, 0)]  # (world, stage)


def layout(mesh, stage, **options):
    return make(mesh, zero3=stage == 3, stage=stage, **options)


def save(folder, world=4, stage=1, step=10, seed=1, **options):
    def work(mesh):
        return save_checkpoint(folder, layout(mesh, stage, seed=seed), step, **options)

    return all_good(on_ranks(world, work))[0]


@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_saves_the_same_digest_and_loads_everywhere(tmp_path, saved):
    manifest = save(tmp_path, *saved)
    path = tmp_path / "step-00000010"
    assert verify_checkpoint(path) == []
    assert manifest.state_digest == digest_of_files(path, manifest) == save(tmp_path / "b", 1, 1).state_digest
    for world, stage in LAYOUTS:

        def work(mesh, stage=stage):
            optimizer = layout(mesh, stage)
            loaded = load_checkpoint(path, optimizer)
            assert loaded == manifest and optimizer.refreshed == 1 and optimizer.updates == 8
            expected = layout(mesh, stage, seed=1).values()
            assert all(
                torch.equal(v.nan_to_num(9.5), expected[k].nan_to_num(9.5)) for k, v in optimizer.values().items()
            )
            return state_digest(optimizer)

        assert set(all_good(on_ranks(world, work))) == {manifest.state_digest}


@pytest.mark.parametrize("chunk_hash, hasher", [("blake3", blake3), ("sha256", hashlib.sha256)])
def test_the_digest_is_the_documented_one(tmp_path, chunk_hash, hasher):
    """Written out from docs/checkpoint.md, over whole parameters; sha256 is what schema 1 hashed its leaves with."""
    manifest = save(tmp_path)
    root = hashlib.sha256()
    for kind, kind_name in enumerate(KINDS):
        for (name, index), values in whole_state(PARAMETERS, 1, kind).items():
            data, node = values.numpy().tobytes(), canonical_json([kind_name, name, index, values.numel()])
            leaves = [hasher(data[at : at + (1 << 16)]).digest() for at in range(0, len(data), 1 << 16)]
            root.update(hashlib.sha256(node + b"".join(leaves)).digest())
    kept = manifest.model_copy(update={"chunk_hash": chunk_hash})
    assert digest_of_files(tmp_path / "step-00000010", kept) == root.hexdigest()
    assert (manifest.state_digest == root.hexdigest()) == (chunk_hash == "blake3")


def test_the_job_writes_12_bytes_per_trained_element(tmp_path):
    manifest = save(tmp_path)
    numel = sum(p.numel for p in PARAMETERS)
    stored = 0
    for entry in manifest.files:
        path = tmp_path / "step-00000010" / entry.name
        assert path.stat().st_size == entry.size
        with safe_open(path, "pt") as file:  # the official reader agrees on the format
            assert set(file.keys()) == {"master", "exp_avg", "exp_avg_sq"}
            stored += sum(4 * file.get_tensor(key).numel() for key in ("master", "exp_avg", "exp_avg_sq"))
    assert stored == 12 * numel


def test_read_parameters_joins_ranges_and_slices(tmp_path):
    save(tmp_path, 3, 3)
    for kind, index in (("master", 0), ("exp_avg_sq", 2)):
        found = read_parameters(tmp_path / "step-00000010", kind=kind)
        whole = whole_state(PARAMETERS, 1, index)
        assert list(found) == [p.name for p in PARAMETERS]
        for p in PARAMETERS:
            parts = [whole[p.name, s] for s in range(p.slices)]
            if p.slices > 1:
                shape = [n // p.slices if d == p.split else n for d, n in enumerate(p.shape)]
                parts = [part.reshape(shape) for part in parts]
            expected = torch.cat(parts, dim=p.split or 0).reshape(p.shape)
            assert torch.equal(found[p.name], expected), p.name


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path):
    def work(mesh):
        return save_checkpoint(tmp_path, make(mesh, seed=1, parameters=PARAMETERS[5:6]), 1)

    manifest = all_good(on_ranks(4, work))[0]
    assert [f.name for f in manifest.files] == ["rank-0000.safetensors"]
    assert verify_checkpoint(tmp_path / "step-00000001") == []


def test_different_values_have_different_digests(tmp_path):
    digests = {save(tmp_path, seed=s).state_digest for s in (1, 2)}
    assert len(digests) == 2

    def work(mesh, place):
        optimizer = make(mesh, seed=1)
        if place is not None and mesh.rank == 3:
            optimizer.exp_avg_sq[place] += 1
        return state_digest(optimizer)

    seen = [on_ranks(4, lambda mesh, p=p: work(mesh, p))[0] for p in (None, 0, 100, 5000)]
    assert len(set(seen)) == 4


def test_swapped_moments_change_the_digest():
    """A digest that hashed kinds without their names would not see this one."""

    def work(mesh, swap):
        optimizer = make(mesh, seed=1)
        if swap:
            optimizer.exp_avg, optimizer.exp_avg_sq = optimizer.exp_avg_sq, optimizer.exp_avg
        return state_digest(optimizer)

    a, b = (on_ranks(2, lambda mesh, s=s: work(mesh, s))[0] for s in (False, True))
    assert a != b


def test_manifest_says_where_everything_is(tmp_path):
    info = {
        "curve_id": "c" * 64, "numerics": {"torch": "2"}, "data_fingerprint": "f", "data_step": 12, "skipped": [3, 4],
        "guard": {"loss": "0x1p+0"}, "faults": ["lr_multiplier"],
    }  # fmt: skip
    save(tmp_path, info=info)
    manifest = read_manifest(tmp_path / "step-00000010", curve_id="c" * 64)
    assert {key: getattr(manifest, key) for key in info} == info
    assert manifest.layout == {"dp": 4, "tp": 1, "pp": 1, "zero": 1} and manifest.finite and manifest.updates == 8
    for tensor in manifest.tensors:
        covered = sorted(r for ranges in tensor.ranges.values() for r in ranges)
        for index in range(tensor.slices) if tensor.slice_numel else ():
            own = [(offset, length) for s, offset, length in covered if s == index]
            assert own[0][0] == 0 and sum(own[-1]) == tensor.slice_numel
            assert all(sum(a) == b[0] for a, b in itertools.pairwise(own))


def test_extras_are_stored_once_and_restored_on_every_rank(tmp_path):
    frozen = {
        "frozen": torch.randn(5, 3), "counter": torch.tensor(7), "mask": torch.tensor([True, False, True]),
        "half": torch.randn(3).bfloat16(), "none": torch.empty(0, 2), "wide": torch.randn(3).double(),
    }  # fmt: skip

    def save_them(mesh):
        # the last rank has one that rank 0 does not: a buffer of a later pipeline stage
        extras = dict(frozen) | ({"later": torch.arange(3)} if mesh.rank == mesh.world - 1 else {})
        return save_checkpoint(tmp_path, make(mesh, seed=1, extras=extras), 3)

    manifest = all_good(on_ranks(3, save_them))[0]
    assert {e.file for e in manifest.extras} == {"rank-0000.safetensors"} and len(manifest.extras) == 7
    assert verify_checkpoint(tmp_path / "step-00000003") == []
    with safe_open(tmp_path / "step-00000003" / "rank-0000.safetensors", "pt") as file:
        for name, value in frozen.items():
            assert torch.equal(file.get_tensor(f"extra.{name}"), value), name

    def load_them(mesh):
        extras = {name: torch.zeros_like(t) for name, t in frozen.items()} | {
            "later": torch.zeros(3, dtype=torch.int64)
        }
        load_checkpoint(tmp_path / "step-00000003", make(mesh, extras=extras))
        return all(torch.equal(extras[n], t) for n, t in frozen.items()) and extras["later"].tolist() == [0, 1, 2]

    assert all_good(on_ranks(2, load_them)) == [True, True]


def test_a_rank_reads_only_what_it_needs(tmp_path, monkeypatch):
    from onecurve.checkpoint import load

    save(tmp_path, 4)
    read: dict[object, int] = {}

    def work(mesh):
        optimizer = make(mesh)
        mine = [tuple(memoryview(v.numpy()).cast("B").shape) for v in optimizer.vectors()]
        load_checkpoint(tmp_path / "step-00000010", optimizer)
        return sum(4 * r.length for r in optimizer.held()) * 3, mine

    original = load.read_into

    def counting(fd, view, position, path, count):  # each rank's load has a `count` of its own
        read[count] = read.get(count, 0) + len(view)
        original(fd, view, position, path, count)

    monkeypatch.setattr(load, "read_into", counting)
    results = all_good(on_ranks(3, work))
    assert sorted(read.values()) == sorted(need for need, _ in results)
