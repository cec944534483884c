"""Whatever happened to a checkpoint's files: refused by name, and the next older one is used."""

import hashlib
import json
import os
import pickle
import random
import shutil

import pytest

from onecurve.checkpoint import latest_checkpoint, load_checkpoint, read_manifest, verify_checkpoint
from onecurve.checkpoint.errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint
from onecurve.checkpoint.manifest import canonical_json, hash_line
from tests.checkpoint.fakes import Param, all_good, make, on_ranks
from tests.checkpoint.test_layouts import save

FILES = [*(f"rank-{r:04d}.safetensors" for r in range(4)), "manifest.json", "manifest.sha256"]


def refused(folder, parameters, names):
    """step 20 is refused everywhere, naming one of `names`; step 10 is used."""
    path = folder / "step-00000020"
    problems = verify_checkpoint(path)
    assert problems and any(name in problem for problem in problems for name in names), problems
    latest, reasons = latest_checkpoint(folder)
    assert latest == folder / "step-00000010"
    assert len(reasons) == 1 and reasons[0].startswith("step-00000020: ") and any(n in reasons[0] for n in names)
    told = on_ranks(2, lambda mesh: load_checkpoint(path, make(mesh, parameters=parameters)))
    assert len({str(error) for error in told}) == 1, told
    assert all(isinstance(error, CheckpointError) and any(n in str(error) for n in names) for error in told), told


def rewrite(path, change):
    """Change the manifest and make its hash right again: what someone with bad intentions would do."""
    raw = json.loads((path / "manifest.json").read_bytes())
    change(raw)
    data = canonical_json(raw)
    (path / "manifest.json").write_bytes(data)
    (path / "manifest.sha256").write_bytes(hash_line(data))


def test_undamaged_is_used(two):
    folder, path, _ = two
    assert latest_checkpoint(folder) == (path, []) and verify_checkpoint(path) == []


@pytest.mark.parametrize("name", FILES)
def test_one_byte_flipped_in_each_file_in_turn(two, name):
    folder, path, parameters = two
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    refused(folder, parameters, [name, "manifest.json"] if name == "manifest.sha256" else [name])


def test_a_bit_flipped_at_200_random_places(two):
    folder, path, parameters = two
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    sizes = {name: (path / name).stat().st_size for name in FILES}
    for trial in range(200):
        # Half of the places anywhere, half in headers and manifests, which are a small part of the bytes.
        name = rng.choices(FILES, [sizes[n] for n in FILES])[0] if trial % 2 else rng.choice(FILES)
        place = rng.randrange(min(sizes[name], 10**9 if trial % 2 else 400))
        original = (path / name).read_bytes()
        data = bytearray(original)
        data[place] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(data)
        latest, reasons = latest_checkpoint(folder)
        assert latest == folder / "step-00000010" and name.split(".")[0] in reasons[0], (name, place)
        told = on_ranks(2, lambda mesh: load_checkpoint(path, make(mesh, parameters=parameters)))
        assert all(isinstance(e, CheckpointError) and name.split(".")[0] in str(e) for e in told), (name, place, told)
        (path / name).write_bytes(original)
    assert latest_checkpoint(folder) == (path, [])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage", ["truncated", "longer", "emptied", "removed", "link", "outside", "folder", "pipe", "pickle"]
)
def test_each_file_spoilt_in_each_way(two, name, damage, tmp_path):
    folder, path, parameters = two
    file = path / name
    data = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(data[:-1])
    elif damage == "longer":
        file.write_bytes(data + b"\0")
    elif damage == "emptied":
        file.touch()
    elif damage == "link":  # to the right bytes, but elsewhere
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "outside":
        file.symlink_to("../../../../etc/passwd")
    elif damage == "folder":
        file.mkdir()
    elif damage == "pipe":
        os.mkfifo(file)
    elif damage == "pickle":
        file.write_bytes(pickle.dumps(_Bomb()))
    refused(folder, parameters, [name, "manifest.json"] if name == "manifest.sha256" else [name])
    assert not _Bomb.went_off


class _Bomb:
    went_off = False

    def __reduce__(self):
        return (setattr, (_Bomb, "went_off", True))


def test_equal_sized_shards_swapped(two):
    folder, path, parameters = two
    a, b = path / FILES[1], path / FILES[2]
    assert a.stat().st_size == b.stat().st_size
    a.rename(path / "x")
    b.rename(a)
    (path / "x").rename(b)
    refused(folder, parameters, [FILES[1], FILES[2]])


def test_a_pickle_of_the_right_size_with_right_hashes(two):
    """Only the header stands between this file and a reader."""
    folder, path, parameters = two
    size = (path / FILES[0]).stat().st_size
    bomb = pickle.dumps(_Bomb()).ljust(size, b".")
    (path / FILES[0]).write_bytes(bomb)
    rewrite(path, lambda raw: raw["files"][0].update(sha256=hashlib.sha256(bomb).hexdigest()))
    refused(folder, parameters, [FILES[0]])
    assert not _Bomb.went_off


def test_an_extra_file(two):
    folder, path, parameters = two
    (path / "rank-0004.safetensors").write_bytes(b"x")
    refused(folder, parameters, ["rank-0004.safetensors"])


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["files"][0].update(name="../step-00000010/rank-0000.safetensors"),
        lambda raw: raw["files"][0].update(name="/etc/passwd"),
        lambda raw: raw["files"][0].update(name="rank-0000.pt"),
        lambda raw: raw["files"][0].update(name="rank-0000.safetensors\n"),
        lambda raw: raw["files"][1].update(name="rank-0000.safetensors"),
        lambda raw: raw["files"][0].update(size=1 << 60),
        lambda raw: raw["files"][0].update(size=-1),
        lambda raw: raw["files"][0].update(size="12"),
        lambda raw: raw["tensors"][0].update(shape=[1 << 40, 1 << 40]),
        lambda raw: raw["tensors"][0].update(shape=[64, 16]),
        lambda raw: raw["tensors"][0].update(slices=0),
        lambda raw: raw["tensors"][0]["ranges"].update({"rank-0003.safetensors": [[0, 0, 1]]}),
        lambda raw: raw["tensors"][0]["ranges"].pop("rank-0000.safetensors"),
        lambda raw: raw["tensors"][0]["ranges"]["rank-0000.safetensors"].append([0, 1 << 40, 16]),
        lambda raw: raw["tensors"].append(raw["tensors"][0]),
        lambda raw: raw["extras"].append(
            {"name": "x", "shape": [3], "dtype": "nonsense", "file": "rank-0000.safetensors", "sha256": "0" * 64}
        ),
        lambda raw: raw.update(step=21),
        lambda raw: raw.update(step=True),
        lambda raw: raw.update(state_digest="0" * 63),
        lambda raw: raw.pop("data_step"),
        lambda raw: raw.update(surprise=1),
        lambda raw: raw.update(schema="1"),
        lambda raw: raw.update(schema=-1),
        lambda raw: raw.update(chunk_hash="md5"),
        lambda raw: raw.update(guard={"deep": None} | {"x": [[[[]]]]}, tensors=None),
    ],
)
def test_a_manifest_with_a_right_hash_and_wrong_content(two, change):
    folder, path, parameters = two
    rewrite(path, change)
    refused(folder, parameters, ["step-00000020"])


def test_a_wrong_state_digest_is_found_by_load_and_by_check(two):
    _, path, parameters = two
    rewrite(path, lambda raw: raw.update(state_digest="0" * 64))
    assert "state digest" in verify_checkpoint(path)[0]
    told = on_ranks(2, lambda mesh: load_checkpoint(path, make(mesh, parameters=parameters)))
    assert all(isinstance(e, DamagedCheckpoint) and "state digest" in str(e) for e in told)


def test_another_curve_is_refused_with_both_names(two):
    folder, path, parameters = two
    told = on_ranks(2, lambda mesh: load_checkpoint(path, make(mesh, parameters=parameters), curve_id="d" * 64))
    assert all(isinstance(e, ForeignCheckpoint) and "curve c, expected " + "d" * 64 in str(e) for e in told)
    assert latest_checkpoint(folder, curve_id="d")[0] is None
    assert latest_checkpoint(folder, curve_id="c")[0] == path


@pytest.mark.parametrize(
    "parameters",
    [
        [Param("a", (32, 64)), Param("b", (2048,))],
        [Param("a", (64, 32)), Param("c", (2048,))],
        [Param("a", (64, 32))],
        [Param("a", (64, 32), slices=2), Param("b", (2048,))],
        [Param("b", (2048,)), Param("a", (64, 32))],
    ],
)
def test_another_model_is_refused_and_the_optimizer_left_alone(two, parameters):
    _, path, _ = two

    def work(mesh):
        optimizer = make(mesh, seed=5, parameters=parameters)
        before = [v.clone() for v in optimizer.vectors()]
        with pytest.raises(ForeignCheckpoint, match=r"parameter|order"):
            load_checkpoint(path, optimizer)
        return all((a == b).all() for a, b in zip(before, optimizer.vectors(), strict=True))

    assert all_good(on_ranks(2, work)) == [True, True]


def test_folders_that_are_no_checkpoints(two, tmp_path):
    folder, path, _ = two
    shutil.copytree(path, folder / "step-00000030")  # another name than its step
    (folder / "step-00000040").mkdir()
    (folder / "step-00000050").symlink_to(path)
    (folder / "step-60").mkdir()
    (folder / ".tmp-step-00000070-0123abcd").mkdir()
    latest, reasons = latest_checkpoint(folder)
    assert latest == path and [r.split(":")[0] for r in reasons] == ["step-00000040", "step-00000030"]
    for name, text in (("step-00000050", "is a link"), ("nothing", "no checkpoint there")):
        with pytest.raises(CheckpointError, match=text):
            read_manifest(folder / name)
    assert latest_checkpoint(folder / "absent") == (None, [])
    shutil.move(path, tmp_path / "best")  # a copy kept under a name of one's own is fine
    assert verify_checkpoint(tmp_path / "best") == []


def test_all_ranks_decide_alike_also_where_the_damage_is_on_one_ranks_files(two):
    folder, path, _ = two
    data = bytearray((path / FILES[3]).read_bytes())
    data[-1] ^= 128
    (path / FILES[3]).write_bytes(data)
    found = all_good(on_ranks(4, lambda mesh: latest_checkpoint(folder, mesh)))
    assert all(f == found[0] for f in found) and found[0][0] == folder / "step-00000010"


def test_values_that_are_not_finite_are_saved_flagged_and_passed_over_on_request(tmp_path):
    save(tmp_path, step=1)

    def work(mesh):
        from onecurve.checkpoint import save_checkpoint

        optimizer = make(mesh, seed=1)
        if mesh.rank == 2:
            optimizer.master[optimizer.held()[0].at] = float("nan")
        return save_checkpoint(tmp_path, optimizer, 2)

    manifest = all_good(on_ranks(4, work))[0]
    assert not manifest.finite and verify_checkpoint(tmp_path / "step-00000002") == []
    assert latest_checkpoint(tmp_path)[0] == tmp_path / "step-00000002"
    path, reasons = latest_checkpoint(tmp_path, finite=True)
    assert path == tmp_path / "step-00000001" and "not finite" in reasons[0]
