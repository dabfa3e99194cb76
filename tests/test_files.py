"""Files are written whole or not at all."""

import errno
import os

import pytest

from sensitivity import files
from sensitivity.errors import InputError, RunError


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def half_write(path, error):
    with files.replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise error


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "new" / "folder" / "table.txt"
    files.write_text(path, "one λ")
    files.write_text(path, "two λ")
    assert path.read_text(encoding="utf-8") == "two λ"
    assert names(path.parent) == ["table.txt"]


def test_the_temporary_name_keeps_the_suffix_and_the_folder(tmp_path):
    with files.replacing(tmp_path / "figure.png") as temporary:
        assert (temporary.suffix, temporary.parent) == (".png", tmp_path.resolve())
        assert temporary.name != "figure.png"
        temporary.write_bytes(b"image")
    assert names(tmp_path) == ["figure.png"]


def test_a_link_is_followed(tmp_path):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    link.symlink_to(real)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(type(error)):
        half_write(path, error)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.parametrize(
    ("code", "kind", "match"),
    [
        (errno.EACCES, InputError, r"cannot write .*a\.bin: no permission in the folder .*; choose another folder\."),
        (errno.EROFS, InputError, "no permission in the folder"),
        (errno.ENOSPC, RunError, r"cannot write .*a\.bin: the disk is full; free some space"),
        (errno.EIO, RunError, r"cannot write .*a\.bin: Input/output error\."),
    ],
)
def test_faults_of_the_file_system(tmp_path, code, kind, match):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(kind, match=match):
        half_write(path, OSError(code, os.strerror(code)))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_folder_that_cannot_be_written(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("the superuser may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="no permission in the folder"):
        files.write_text(tmp_path / "a.txt", "text")
    tmp_path.chmod(0o700)


def test_a_folder_is_checked_before_work_is_done_for_it(tmp_path):
    files.check_folder(tmp_path / "not" / "there" / "yet")
    assert names(tmp_path) == []
    (tmp_path / "file").write_text("a file")
    with pytest.raises(InputError, match=r"cannot write to .*file.deeper: Not a directory; choose another folder"):
        files.check_folder(tmp_path / "file" / "deeper")


def test_what_is_no_place_for_a_file(tmp_path):
    with pytest.raises(InputError, match="it is a directory; name a file"):
        files.write_text(tmp_path, "text")
    with pytest.raises(InputError, match="it is not a regular file; name a file"):
        files.write_text("/dev/null", "text")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(InputError, match="file is not a folder; choose another place"):
        files.write_text(tmp_path / "file" / "a.txt", "text")
