"""Wheel, editable install and checkout find the same configs; pins, ranges and scripts agree."""

import email
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PRINT_CONFIG_DIR = "from stability_lab.config import config_dir; print(config_dir())"


def yaml_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")}


def reported_path(cwd: Path, *arguments: str, pythonpath: Path | None = None) -> Path:
    """The path that a fresh interpreter with these arguments prints, started in `cwd`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a release makes it: from the sdist, so both must hold the configs."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_checkout_finds_its_configs_from_another_folder(tmp_path: Path) -> None:
    found = reported_path(tmp_path, "-c", PRINT_CONFIG_DIR, pythonpath=ROOT)
    assert found.is_absolute()
    assert found.resolve() == ROOT / "configs"
    assert (found / "train.yaml").is_file()


@pytest.mark.slow
def test_wheel_finds_its_configs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site with space"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, capture_output=True)
    found = reported_path(tmp_path, "-c", PRINT_CONFIG_DIR, pythonpath=target)
    assert found.resolve() == (target / "stability_lab" / "configs").resolve()
    assert yaml_files(found) == yaml_files(ROOT / "configs") != set()


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
        entry_points = archive.read(metadata_name.replace("METADATA", "entry_points.txt")).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"stability_lab", metadata_name.split("/")[0]}
    packaged = {name.removeprefix("stability_lab/configs/") for name in names if "/configs/" in name}
    assert packaged == yaml_files(ROOT / "configs")
    assert metadata["Name"] == "stability-lab"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "stability-lab = stability_lab.cli:main" in entry_points


@pytest.mark.slow
def test_editable_install_reads_the_configs_of_the_checkout(tmp_path: Path) -> None:
    """An editable wheel carries a copy of the configs too; an edit in the checkout must win over it."""
    source = tmp_path / "checkout"
    source.mkdir()
    for name in ("stability_lab", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (editable,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(editable) as archive:
        archive.extractall(site)
    (source / "configs" / "added_later.yaml").write_text("seed: 1\n", encoding="utf-8")
    # -S keeps this environment's own editable install out; its libraries come after the folder under test.
    libraries = [entry for entry in sys.path if entry.endswith("-packages")]
    paths = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.extend({libraries!r})"
    found = reported_path(tmp_path, "-I", "-S", "-c", f"{paths}; {PRINT_CONFIG_DIR}")
    assert found.resolve() == (source / "configs").resolve()
    assert "added_later.yaml" in yaml_files(found)


def test_configs_holds_only_yaml() -> None:
    strangers = [path for path in (ROOT / "configs").rglob("*") if path.is_file() and path.suffix != ".yaml"]
    assert strangers == []


def test_every_requirement_has_a_pin_in_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, str] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        (specifier,) = pin.specifier
        assert specifier.operator == "==", line
        assert not set("+@*") & set(line), f"{line} would fit one machine or index only"
        pins[canonicalize_name(pin.name)] = specifier.version
    groups = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *groups["dev"], *groups["sweep"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def run_setup(environment: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(ROOT / "scripts" / "setup.sh")],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ((), "-m stability_lab demo"),
        (("seed=1", "run_name=a b"), "-m stability_lab train +stabilizer=qknorm seed=1 run_name=a b"),
    ],
)
def test_quickstart_shows_the_demo_and_trains_where_it_has_arguments(
    tmp_path: Path, words: tuple[str, ...], started: str
) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    shutil.copy(ROOT / "scripts" / "quickstart.sh", tmp_path)
    write_program(tmp_path / "python", 'echo "$@"')
    (tmp_path / "setup.sh").write_text(f"echo {tmp_path}/python\n", encoding="utf-8")
    command = [bash, str(tmp_path / "quickstart.sh"), *words]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{started}\n"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with the few tools that setup.sh needs, a python3 that fails when called, and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("dirname", "ls", "sort", "tr", "sed"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    write_program(folder / "python3", "echo 'shim: no such version' >&2; exit 127")
    return folder


def test_setup_says_that_no_python_is_in_range(tools: Path, tmp_path: Path) -> None:
    environment = {"PATH": str(tools), "STABILITY_LAB_VENV": str(tmp_path / "venv")}
    done = run_setup(environment, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no working Python 3.11, 3.12 or 3.13")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_setup_leaves_a_folder_alone_that_is_no_environment(tools: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / "results.csv").write_text("1\n", encoding="utf-8")
    done = run_setup({"PATH": str(tools), "STABILITY_LAB_VENV": str(folder)}, tmp_path)
    assert done.returncode == 1
    assert "is not a virtual environment" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["results.csv"]


def test_setup_passes_over_a_broken_shim_and_installs_once(tools: Path, tmp_path: Path) -> None:
    """python3 fails, python3.11 runs; pip is a stand-in that records its call, so nothing is downloaded."""
    calls = tmp_path / "calls"
    venv = tmp_path / "a venv"
    # Answers `-m venv` with a folder whose Python is this script, records pip, and is a Python otherwise.
    fake = tools / "python3.11"
    write_program(
        fake,
        'if [ "$1 $2" = "-m venv" ]; then mkdir -p "$4/bin"; touch "$4/pyvenv.cfg"; cp "$0" "$4/bin/python"\n'
        f'elif [ "$1 $2" = "-m pip" ]; then echo "$*" >> "{calls}"\n'
        f'else exec "{sys.executable}" "$@"; fi',
    )
    for name in ("mkdir", "touch", "cp", "rm"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    environment = {"PATH": str(tools), "STABILITY_LAB_VENV": str(venv)}
    for _ in range(2):
        done = run_setup(environment, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(venv / "bin" / "python")
    assert calls.read_text(encoding="utf-8").splitlines() == ["-m pip install -c constraints.txt -e ."]
