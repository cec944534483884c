import os
from pathlib import Path

import pytest

from onecurve.data.sources import collect, examine, reread, show
from onecurve.errors import InputError


@pytest.fixture
def tree(tmp_path):
    for name in ["a.txt", "b.py", "sub/c.txt", "sub/deep/d.txt", "tests/test_e.txt", ".git/f.txt", "sub/.g.txt"]:
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "tree"


@pytest.mark.parametrize(
    "glob, exclude, names",
    [
        ("*.txt", (), "a.txt c.txt d.txt test_e.txt"),
        ("*", (), "a.txt b.py c.txt d.txt test_e.txt"),
        ("**/*.txt", (), "a.txt c.txt d.txt test_e.txt"),
        ("sub/*.txt", (), "c.txt"),
        ("sub/**", (), "c.txt d.txt"),
        ("[ab].*", (), "a.txt b.py"),
        ("[!a-c].txt", (), "d.txt"),
        ("?.txt", (), "a.txt c.txt d.txt"),
        ("*.txt", ("test*",), "a.txt c.txt d.txt"),
        ("*.txt", ("deep", "tests"), "a.txt c.txt"),
        ("*.txt", ("sub/deep",), "a.txt c.txt test_e.txt"),
    ],
)
def test_folders_with_patterns(tree, glob, exclude, names):
    assert sorted(file.name for file in collect([tree], [glob], exclude)) == names.split()


def test_files_are_taken_as_they_are_and_once(tree):
    files = collect(
        [tree / "b.py", tree / ".git" / "f.txt", tree, tree / "a.txt", tree / "sub" / ".." / "a.txt"], ["*.txt"]
    )
    assert sorted(file.name for file in files) == ["a.txt", "b.py", "c.txt", "d.txt", "f.txt", "test_e.txt"]


@pytest.mark.parametrize(
    "name", ["with some spaces.txt", "日本語 ñ.txt", "new\nline.txt", "[x].txt", os.fsdecode(b"\xff\xfe.txt")]
)
def test_names_of_all_kinds(tmp_path, name):
    (tmp_path / name).write_bytes(b"content")
    for path in (tmp_path, tmp_path / name):
        (file,) = collect([path], ["*.txt"])
        assert examine(file, lambda count: None).size == 7
    shown = show(tmp_path / name)
    assert shown.isprintable()
    shown.encode()


def refused(*words, call):
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message, message


def test_refusals_name_the_place(tree):
    refused("no path was given", call=lambda: collect([], ["*"]))
    refused("nowhere", "No such file", call=lambda: collect([tree / "nowhere"], ["*"]))
    refused("embedded null", call=lambda: collect(["a\0b"], ["*"]))
    refused("tree", "'*.rst'", "4 with .txt", "1 with .py", "--glob", call=lambda: collect([tree], ["*.rst"]))
    (tree / "empty").mkdir()
    refused("no files at all", call=lambda: collect([tree / "empty"], ["*"]))


def test_files_that_can_not_be_read(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "memory.txt").symlink_to("/proc/self/mem")  # reading its beginning fails for every user, root too
    os.mkfifo(tmp_path / "pipe.txt")
    for name, word in [
        ("gone.txt", "No such file"),
        ("memory.txt", "can't be read"),
        ("pipe.txt", "not a regular file"),
    ]:
        refused(name, word, call=lambda name=name: examine(tmp_path / name, lambda count: None))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tree):
    (tree / "a.txt").chmod(0)
    (tree / "sub").chmod(0)
    try:
        refused("a.txt", "Permission denied", call=lambda: examine(tree / "a.txt", lambda count: None))
        refused("sub", "Permission denied", call=lambda: collect([tree], ["*.txt"]))
    finally:
        (tree / "sub").chmod(0o700)


def test_a_file_that_changes_meanwhile(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text("one")
    document = examine(file, lambda count: None)
    assert b"".join(reread(document)) == b"one"
    file.write_text("two")
    refused("log.txt", "changed", call=lambda: list(reread(document)))
    assert Path(document.path) == file
