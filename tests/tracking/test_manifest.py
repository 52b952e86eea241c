import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime

import numpy
import pytest

import stability_lab
from stability_lab.tracking import manifest as module
from stability_lab.tracking.manifest import fingerprint, git_state, manifest, redact

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_manifest_of_this_process():
    result = manifest(["train", f"tracking.api_key={KEY}", "seed=1"], {"device": "cpu"})
    assert json.loads(json.dumps(result)) == result
    assert result["versions"]["numpy"] == numpy.__version__
    assert result["versions"]["stability_lab"] == stability_lab.__version__
    assert result["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert result["argv"] == ["train", "tracking.api_key=[redacted]", "seed=1"]
    assert result["device"] == "cpu"
    assert 0 <= (datetime.now(UTC) - datetime.fromisoformat(result["created"])).total_seconds() < 60
    assert KEY not in json.dumps(result)


def test_absent_package_is_none(monkeypatch):
    def version(name):
        if name == "wandb":
            raise module.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(module.metadata, "version", version)
    assert manifest([])["versions"]["wandb"] is None


def test_manifest_imports_nothing_heavy():
    code = (
        "import sys; from stability_lab.tracking.manifest import manifest; manifest();"
        "print([m for m in ('torch', 'wandb', 'numpy', 'hydra', 'omegaconf') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(package) is None
    git(tmp_path, "init", "-q")
    assert git_state(package) is None  # not tracked, as an installed package inside a checkout
    git(tmp_path, "add", ".")
    assert git_state(package) is None  # no revision yet
    git(tmp_path, "commit", "-qm", "x", "--no-verify")
    assert git_state(package) == {"revision": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (package / "b.py").write_text("2")
    assert git_state(package) == {"revision": git(tmp_path, "rev-parse", "HEAD"), "dirty": True}
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a git hook
    assert git_state(package) is not None


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("git"),
        subprocess.TimeoutExpired("git", 2),
        subprocess.CalledProcessError(128, "git"),
    ],
)
def test_git_never_fails(tmp_path, monkeypatch, error):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(module.subprocess, "run", run)
    assert git_state(tmp_path) is None


CONFIG = {
    "seed": 1,
    "trainer": {"max_steps": 10, "log_every": 1},
    "optimizer": {"lr": 1e-3},
    "tracking": {"mode": "auto"},
    "output_dir": "outputs",
    "run_name": None,
    "group": None,
    "if_exists": "new",
    "sweep": {"strict": False},
}


def test_fingerprint_by_hand():
    text = '{"config":{"optimizer.lr":0.001,"seed":1,"trainer.max_steps":10},"version":"0.1.0"}'
    assert fingerprint(CONFIG, "0.1.0") == hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    "change",
    [
        {"tracking": {"mode": "offline"}},
        {"output_dir": "elsewhere"},
        {"run_name": "x"},
        {"group": "x"},
        {"if_exists": "skip"},
        {"sweep": {"strict": True}},
        {"hydra": {"job": 1}},
        {"trainer": {"max_steps": 10, "log_every": 100}},
        {"trainer": {"max_steps": 10}},
    ],
)
def test_fingerprint_ignores_what_computes_nothing(change):
    assert fingerprint({**CONFIG, **change}, "0.1.0") == fingerprint(CONFIG, "0.1.0")


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"trainer": {"max_steps": 11, "log_every": 1}}, {"stabilizer": {"qknorm": {}}}]
)
def test_fingerprint_sees_the_rest(change):
    assert fingerprint({**CONFIG, **change}, "0.1.0") != fingerprint(CONFIG, "0.1.0")


def test_fingerprint_sees_the_version_and_not_the_order():
    assert fingerprint(CONFIG, "0.1.1") != fingerprint(CONFIG, "0.1.0")
    assert fingerprint(dict(reversed(CONFIG.items())), "0.1.0") == fingerprint(CONFIG, "0.1.0")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("api_key", "sixteen-chars-16"),
        ("apiKey", "sixteen-chars-16"),
        ("WANDB_API_KEY", "sixteen-chars-16"),
        ("hub_token", "abcdefghijklmnop"),
        ("PASSWORD", "p@ss<word>p@ss<word>"),
        ("client_secret", "a" * 16),
        ("api_key", "SECRET"),
        ("secret", "a text of several words"),
        ("password", "x"),
        ("hf_token", "abc"),
        ("wandbApiKey", "abc"),
        ("note", KEY),
        ("note", "wandb_v1_" + "aB3_" * 10),
        ("note", "hf_" + "aB3d" * 8),
    ],
)
def test_credentials_are_hidden(key, value):
    assert redact({key: value}) == {key: "[redacted]"}
    assert redact({"a": [{key: value}]}) == {"a": [{key: "[redacted]"}]}
    assert redact([f"+a.{key}={value}"]) == [f"+a.{key}=[redacted]"]


def test_a_credential_of_digits_is_hidden_and_an_absent_one_is_not():
    assert redact({"password": 1234, "api_key": None}) == {"password": "[redacted]", "api_key": None}


def test_credentials_inside_a_text_are_hidden():
    assert redact(f"curl -H {KEY} x") == "curl -H [redacted] x"
    assert redact(("--header", f"Bearer hf_{'aB3d' * 8}")) == ("--header", "Bearer [redacted]")


def test_credentials_of_the_environment_are_hidden(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "short-one")
    monkeypatch.setenv("WANDB_API_KEY", "local-of-unusual-form")
    assert redact({"a": "xshort-onex", "b": "local-of-unusual-form"}) == {
        "a": "x[redacted]x",
        "b": "[redacted]",
    }


def test_all_else_survives():
    config = {
        "tokenizer": {"name": "a-tokenizer-with-a-long-name", "vocab_size": 4096},
        "tokens": 12_000_000_000,
        "tokens_per_step": "a-long-text-without-spaces",
        "eos_token": "<|end_of_the_whole_text|>",
        "pad_token": "[PAD]",
        "api_key": None,
        "key": "short",
        "sort_key": "name",
        "bos_token": "<s>",
        "hub_token": "",
        "token": 1234567890123456,
        "qk_norm": True,
        "data": {"sha256": "ab" * 32, "revision": KEY, "text": "ab" * 32},
        "run_name": "qknorm-lr3e-2-seed1-with-a-long-name",
    }
    assert redact(config) == config
    argv = [
        "/usr/bin/x",
        "train",
        "+stabilizer=[qknorm,zloss]",
        f"data.revision={KEY}",
        "tokenizer=bytes",
        "-m",
    ]
    assert redact(argv) == argv
