"""Test the cache of built libraries, which run as this user."""

import errno
import fcntl
import grp
import importlib
import logging
import os
import pwd
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.errors import NativeBuildError
from lightning_zero.native.build import build
from lightning_zero.native.cache import check_owner, default_cache
from tests.unit.native.stand_in import WRITE, Compiler

SOMEBODY = 54321


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it another user's, as seen from this process."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_cache_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        library = build(tmp_path / "home" / "cache", Compiler(tmp_path).path)
    finally:
        os.umask(before)
    assert mode(library.parent.parent) == mode(library.parent) == 0o700
    assert mode(library) == 0o755


def test_a_cache_that_more_users_may_read_stays_so(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    assert mode(build(shared, Compiler(tmp_path).path).parent) == 0o755


@pytest.mark.parametrize("what", ["the cache", "an entry", "the library"])
def test_what_others_can_write_is_refused(tmp_path: Path, what: str) -> None:
    library = build(tmp_path / "cache", Compiler(tmp_path).path)
    path = {"the cache": library.parent.parent, "an entry": library.parent, "the library": library}[what]
    for bits in (0o020, 0o002):
        path.chmod(0o700 | bits)
        with pytest.raises(
            NativeBuildError, match=rf"{path} .*can be written by others.*chmod -R go-w.*LIGHTNING_ZERO"
        ):
            build(tmp_path / "cache", Compiler(tmp_path).path)
    path.chmod(0o755)
    assert build(tmp_path / "cache", Compiler(tmp_path).path) == library


@pytest.mark.parametrize("what", ["the cache", "an entry", "the library"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    library = build(tmp_path / "cache", Compiler(tmp_path).path)
    path = {"the cache": library.parent.parent, "an entry": library.parent, "the library": library}[what]
    give_away(path, monkeypatch)
    with pytest.raises(NativeBuildError, match=r"belongs to another user .*LIGHTNING_ZERO_CACHE to a writable"):
        build(tmp_path / "cache", Compiler(tmp_path).path)


def test_nothing_is_built_in_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, compiler = tmp_path / "cache", Compiler(tmp_path)
    cache.mkdir(mode=0o755)
    give_away(cache, monkeypatch)
    with pytest.raises(NativeBuildError, match="belongs to another user"):
        build(cache, compiler.path)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("what", ["an entry", "the library"])
def test_a_link_inside_the_cache_is_refused(tmp_path: Path, what: str) -> None:
    library = build(tmp_path / "cache", Compiler(tmp_path).path)
    path = {"an entry": library.parent, "the library": library}[what]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NativeBuildError, match=rf"{path} .*is a symbolic link.*Delete it.*set LIGHTNING_ZERO_CACHE"):
        build(tmp_path / "cache", Compiler(tmp_path).path)


def test_a_lock_that_is_a_link_empties_nothing(tmp_path: Path) -> None:
    library = build(tmp_path / "cache", Compiler(tmp_path).path)
    library.unlink()
    (library.parent / "lock").unlink()
    (tmp_path / "precious").write_text("kept")
    (library.parent / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(NativeBuildError, match="Cannot write the build cache"):
        build(tmp_path / "cache", Compiler(tmp_path).path)
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_cache_behind_a_link_is_the_one_that_the_link_names(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    library = build(tmp_path / "link" / "cache", Compiler(tmp_path).path)
    assert library.is_relative_to(tmp_path.resolve() / "scratch" / "cache")
    (tmp_path / "scratch").chmod(0o777)
    with pytest.raises(NativeBuildError, match=r"scratch, which others can write"):
        build(tmp_path / "link" / "cache", Compiler(tmp_path).path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(NativeBuildError, match=r"loop .*Set LIGHTNING_ZERO_CACHE|Cannot write the build cache"):
        build(tmp_path / "loop" / "cache", Compiler(tmp_path).path)


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "to be built"])
def test_a_cache_that_others_could_replace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_built: bool
) -> None:
    def unknown(group: int) -> None:
        raise KeyError(group)

    monkeypatch.setattr(grp, "getgrgid", unknown)  # root's group may have no other member
    above, compiler = tmp_path / "above", Compiler(tmp_path)
    cache = above / "between" / "cache"
    (above / "between").mkdir(parents=True, mode=0o755)
    if is_built:
        build(cache, compiler.path)
    for mode in (0o757, 0o775):
        above.chmod(mode)
        with pytest.raises(NativeBuildError, match=rf"in {above}, which others can write.*chmod go-w {above}.*CACHE"):
            build(cache, compiler.path)
    above.chmod(0o1777)  # as /tmp: only owners may rename
    assert build(cache, compiler.path).exists()
    above.chmod(0o755)
    give_away(above, monkeypatch)
    with pytest.raises(NativeBuildError, match=r"belongs to another user .*LIGHTNING_ZERO_CACHE to a writable"):
        build(cache, compiler.path)


def test_a_group_of_one_user_may_write_above_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some distributions give each user such a group, and a umask by which it may write."""
    own = pwd.struct_passwd(("me", "x", os.geteuid(), 777, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda user: own)
    monkeypatch.setattr(grp, "getgrgid", lambda group: grp.struct_group(("me", "x", group, members)))
    above, real = tmp_path / "above", Path.stat

    def stat_of(path: Path, **options: Any) -> os.stat_result:
        found = real(path, **options)
        return os.stat_result((*found[:5], 777, *found[6:10])) if path == above else found

    monkeypatch.setattr(Path, "stat", stat_of)
    above.mkdir()
    above.chmod(0o775)
    members = ["me"]
    assert build(above / "cache", Compiler(tmp_path).path).exists()
    members = ["me", "somebody"]
    with pytest.raises(NativeBuildError, match="which others can write"):
        build(above / "cache", Compiler(tmp_path).path)


def test_whatever_the_umask_nobody_else_may_write_above_a_new_cache(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        library = build(tmp_path / "new" / "newer" / "cache", Compiler(tmp_path).path)
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == mode(tmp_path / "new" / "newer") == 0o755
    assert library.exists()


def test_a_home_in_the_environment_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LIGHTNING_ZERO_CACHE", "~/x")
    assert build(compiler=Compiler(tmp_path).path).is_relative_to(tmp_path / "home" / "x")
    assert build(Path("~/y"), Compiler(tmp_path).path).is_relative_to(tmp_path / "home" / "y")
    monkeypatch.delenv("LIGHTNING_ZERO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/z")
    assert default_cache() == tmp_path / "home" / "z" / "lightning_zero"
    monkeypatch.setenv("LIGHTNING_ZERO_CACHE", "~no-such-user/x")
    with pytest.raises(NativeBuildError, match=r"'~no-such-user/x' begins with a home.*LIGHTNING_ZERO_CACHE"):
        default_cache()
    assert not (tmp_path / "~").exists()


def test_what_belongs_to_root_is_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    check_owner(Path("/usr"))


def test_a_cache_that_was_filled_ahead_of_time_may_be_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(tmp_path / "cache", Compiler(tmp_path).path)
    (library.parent / "lock").unlink()

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    # Permissions would not stop root, who runs many tests.
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert build(tmp_path / "cache", "no-such-compiler") == library


def test_a_cache_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(NativeBuildError, match=r"may not read the build cache .*cache.*Set LIGHTNING_ZERO_CACHE"):
        check_owner(tmp_path / "cache")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_without_locks_it_builds_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def flock(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    compiler = Compiler(tmp_path, WRITE.format(pause=0.05))
    results: list[str] = []
    builders = [
        threading.Thread(target=lambda: results.append(build(tmp_path / "cache", compiler.path, 0).read_text()))
        for _ in range(2)
    ]
    with caplog.at_level(logging.WARNING):
        for thread in builders:
            thread.start()
        for thread in builders:
            thread.join()
    assert results == ["whole\n"] * 2
    assert "C++ executor: no lock" in caplog.text
    assert os.strerror(code) in caplog.text
    assert "Another process" not in caplog.text


class TestWithoutHome:
    @pytest.fixture(autouse=True)
    def _no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(user: int) -> None:
            raise KeyError(user)

        for name in ("HOME", "XDG_CACHE_HOME", "LIGHTNING_ZERO_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", unknown)

    def test_temporary_files_hold_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert default_cache() == tmp_path / f"lightning_zero-{os.geteuid()}"
        library = build(compiler=Compiler(tmp_path).path)
        assert library.is_relative_to(default_cache())
        assert mode(default_cache()) == 0o700

    def test_a_folder_that_somebody_put_there_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        default_cache().mkdir(mode=0o700)
        give_away(default_cache(), monkeypatch)
        monkeypatch.setenv("LIGHTNING_ZERO_CACHE", str(next(tmp_path.glob("lightning_zero-*"))))
        with pytest.raises(NativeBuildError, match="belongs to another user"):
            build(compiler=Compiler(tmp_path).path)

    def test_without_temporary_files_either_it_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def none() -> str:
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

        monkeypatch.setattr(tempfile, "gettempdir", none)
        with pytest.raises(NativeBuildError, match=r"no home directory.*No usable temporary.*Set LIGHTNING_ZERO_CACHE"):
            build(compiler="no-such-compiler")


def test_a_library_that_does_not_load_says_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_module = importlib.import_module("lightning_zero.native.load")
    monkeypatch.setattr(load_module, "build", lambda: tmp_path / "gone.so")
    with pytest.raises(NativeBuildError, match=r"gone\.so does not load.*LIGHTNING_ZERO_CACHE.*built-by"):
        load_module.load.__wrapped__()
