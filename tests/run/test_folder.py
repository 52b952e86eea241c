"""Names that are safe anywhere and say what varies; folders that are never shared or lost."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stability_lab.config import ConfigError
from stability_lab.disk.lock import Lock
from stability_lab.run.folder import (
    LONGEST,
    FolderClaim,
    InUse,
    claim_directory,
    claim_run,
    new_directory,
    run_name,
    slug,
    sweep_name,
)

FINGERPRINT = "0a1b2c3d4e5f"


def test_slug_is_safe_in_any_shell() -> None:
    assert slug("a b/c=[1,2] 'x'") == "a-b-c-1-2-x"
    assert slug("../x") == "x"
    assert slug("3e-2") == "3e-2"


def test_run_name_says_what_varies() -> None:
    overrides = [("seed", "1"), ("optimizer.lr", "0.03"), ("stabilizer.zloss.weight", "1e-5"), ("tracking", "local")]
    name = run_name(["zloss", "qknorm"], overrides, FINGERPRINT)
    assert name == "qknorm-zloss_lr0.03_seed1_zloss.weight1e-5_0a1b2c3d"
    assert run_name(["qknorm", "zloss"], reversed(overrides), FINGERPRINT) == name
    assert run_name([], [], FINGERPRINT) == "none_0a1b2c3d"


@pytest.mark.parametrize(
    "key", ["output_dir", "group", "run_name", "if_exists", "resume", "hydra.sweep.dir", "tracking.mode"]
)
def test_paths_and_logging_are_no_part_of_a_name(key: str) -> None:
    assert run_name([], [(key, "x")], FINGERPRINT) == "none_0a1b2c3d"


def test_a_large_value_is_not_named_like_a_small_one() -> None:
    large, small = (run_name([], [("optimizer.lr", f"{lr:g}")], FINGERPRINT) for lr in (1e38, 1e-38))
    assert (large, small) == ("none_lr1e38_0a1b2c3d", "none_lr1e-38_0a1b2c3d")


def test_long_names_are_cut_but_keep_their_hash() -> None:
    overrides = [(f"model.some_long_key_{i}", "1" * 20) for i in range(20)]
    name = run_name(["qknorm"], overrides, FINGERPRINT)
    assert len(name) == LONGEST
    assert name.endswith("_0a1b2c3d")


def test_sweep_name_depends_on_all_runs_but_not_on_their_order() -> None:
    name = sweep_name(["stabilizer", "optimizer.lr"], ["0a", "1b"])
    assert re.fullmatch(r"sweep_stabilizer_lr_[0-9a-f]{8}", name)
    assert sweep_name(["optimizer.lr", "stabilizer"], ["1b", "0a", "1b"]) == name
    assert sweep_name(["stabilizer", "optimizer.lr"], ["0a", "1c"]) != name


def finish(path: Path, status: str, fingerprint: str = FINGERPRINT) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text("seed: 0\n", encoding="utf-8")
    (path / "summary.json").write_text(json.dumps({"status": status}), encoding="utf-8")
    (path / "manifest.json").write_text(json.dumps({"fingerprint": fingerprint}), encoding="utf-8")


@pytest.fixture
def claim() -> Iterator[Callable[..., FolderClaim]]:
    """`claim_directory`, whose locks are released at the end."""
    held: list[Lock] = []

    def make(path: Path, if_exists: str, fingerprint: str = FINGERPRINT) -> FolderClaim:
        result = claim_directory(path, if_exists, fingerprint)
        if result.lock is not None:
            held.append(result.lock)
        return result

    yield make
    for lock in held:
        lock.release()


def test_new_makes_numbered_siblings(tmp_path: Path, claim: Callable[..., FolderClaim]) -> None:
    wanted = tmp_path / "out" / "runs" / "a"
    claims = [claim(wanted, "new") for _ in range(3)]
    assert [claim.path.name for claim in claims] == ["a", "a-2", "a-3"]
    assert not any(claim.resumes for claim in claims)
    assert all((claim.path / ".lock").is_file() for claim in claims)


@pytest.mark.parametrize("status", ["completed", "diverged"])
@pytest.mark.parametrize("policy", ["skip", "resume"])
def test_a_finished_run_is_found(tmp_path: Path, status: str, policy: str, claim: Callable[..., FolderClaim]) -> None:
    finish(tmp_path / "a", "interrupted")
    finish(tmp_path / "a-2", status)
    assert claim(tmp_path / "a", policy) == FolderClaim(tmp_path / "a-2")


@pytest.mark.parametrize("status", ["interrupted", "failed", "running"])
@pytest.mark.parametrize("policy", ["skip", "resume"])
def test_what_did_not_finish_goes_on(
    tmp_path: Path, status: str, policy: str, claim: Callable[..., FolderClaim]
) -> None:
    finish(tmp_path / "a", status, "another")
    finish(tmp_path / "a-2", status)
    if policy == "resume":  # the folder's own run comes first, for its differences to be named
        assert claim(tmp_path / "a", policy)[::2] == (tmp_path / "a", True)
    else:
        assert claim(tmp_path / "a", policy)[::2] == (tmp_path / "a-2", True)


@pytest.mark.parametrize("policy", ["skip", "resume"])
def test_a_run_that_another_process_holds_is_refused(
    tmp_path: Path, policy: str, claim: Callable[..., FolderClaim]
) -> None:
    finish(tmp_path / "a", "running")
    claim(tmp_path / "a", policy)
    with pytest.raises(ConfigError, match=rf"a is in use by process {os.getpid()} on .*, since 20"):
        claim(tmp_path / "a", policy)
    with pytest.raises(ConfigError, match="is in use by process"):
        claim(tmp_path / "a", "overwrite")
    assert (tmp_path / "a" / "config.yaml").is_file()
    assert claim(tmp_path / "a", "new").path == tmp_path / "a-2"


def test_skip_runs_beside_a_run_that_computed_something_else(tmp_path: Path, claim: Callable[..., FolderClaim]) -> None:
    finish(tmp_path / "a", "completed", "another")
    assert claim(tmp_path / "a", "skip")[::2] == (tmp_path / "a-2", False)


@pytest.mark.parametrize("name", ["summary.json", "manifest.json"])
@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_damaged_run_is_an_unfinished_one(
    tmp_path: Path, name: str, content: str, claim: Callable[..., FolderClaim]
) -> None:
    finish(tmp_path / "a", "completed")
    (tmp_path / "a" / name).write_text(content, encoding="utf-8")
    assert claim(tmp_path / "a", "skip")[::2] == (tmp_path / "a", True)


def test_a_folder_in_which_nothing_was_written_is_taken(tmp_path: Path, claim: Callable[..., FolderClaim]) -> None:
    """What a process leaves that is killed in its first moments."""
    (tmp_path / "a").mkdir()
    for name in (".lock", ".config.yaml.17.tmp"):
        (tmp_path / "a" / name).write_text("half", encoding="utf-8")
    (tmp_path / "a" / "metrics.jsonl").touch()
    assert claim(tmp_path / "a", "resume")[::2] == (tmp_path / "a", False)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("years of work", encoding="utf-8")
    assert claim(tmp_path / "b", "resume").path == tmp_path / "b-2"


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", ".lock", "checkpoints/last"])
def test_a_run_with_a_symbolic_link_is_not_written_to(tmp_path: Path, name: str) -> None:
    finish(tmp_path / "a", "interrupted")
    (tmp_path / "outside").mkdir()
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / name).unlink(missing_ok=True)
    (tmp_path / "a" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        claim_run(tmp_path / "a")


def test_error_refuses_an_existing_folder(tmp_path: Path, claim: Callable[..., FolderClaim]) -> None:
    assert claim(tmp_path / "a", "error").path == tmp_path / "a"
    with pytest.raises(ConfigError, match=r"if_exists=error: .*a exists"):
        claim(tmp_path / "a", "error")


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path: Path, claim: Callable[..., FolderClaim]) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"if_exists=overwrite: .* left alone"):
        claim(run, "overwrite")
    assert (run / "thesis.txt").exists()
    (run / "config.yaml").write_text("seed: 0\n", encoding="utf-8")
    (run / "checkpoints").mkdir()
    assert claim(run, "overwrite")[::2] == (run, False)
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="output_dir and group: cannot create"):
        new_directory(tmp_path / "file" / "runs" / "a")


@pytest.mark.parametrize("link", ["outputs", "outputs/runs", "outputs/runs/a"])
@pytest.mark.parametrize("target", ["nowhere", "a", "/dev/null/x"])
def test_a_link_that_leads_nowhere_is_named(here: Path, link: str, target: str) -> None:
    """Also a link to itself. It once kept the search for a free name going for ever."""
    path = here / "outputs" / "runs" / "a"
    (here / link).parent.mkdir(parents=True, exist_ok=True)
    (here / link).symlink_to(target)
    if path.is_symlink():
        assert new_directory(path) == path.with_name("a-2")
        return
    with pytest.raises(
        ConfigError, match=rf"output_dir and group: .*{link} is a link to {target}, which leads nowhere"
    ):
        new_directory(path)


@pytest.mark.parametrize("file", ["metrics.jsonl", "train.log", "checkpoints/last/state.json"])
@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_a_run_with_something_that_is_no_file_is_not_gone_on_with(tmp_path: Path, file: str, kind: str) -> None:
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("seed: 0\n", encoding="utf-8")
    {"FIFO": os.mkfifo, "folder": os.mkdir}[kind](tmp_path / file)
    with pytest.raises(ConfigError, match=f"{file} is a {kind}, and a run's folder has none"):
        claim_run(tmp_path)
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("written", [(), ("train.log",), ("train.log", "config.yaml")])
def test_what_another_process_has_just_begun_is_in_use(tmp_path: Path, written: tuple[str, ...]) -> None:
    """However far it has come: two starts of one sweep make one folder for a job."""
    first = claim_directory(tmp_path / "a", "skip", FINGERPRINT)
    for name in written:
        (first.path / name).write_text("seed: 0\n", encoding="utf-8")
    with pytest.raises(InUse, match="is in use by process") as error:
        claim_directory(tmp_path / "a", "skip", FINGERPRINT)
    assert error.value.path == tmp_path / "a"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert first.lock is not None
    first.lock.release()
