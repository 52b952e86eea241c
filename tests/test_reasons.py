"""What went wrong is said in our own words: the tensor, the line, what would be right; never a library's first line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import stability_lab
from stability_lab.build import check
from stability_lab.commands.train import main
from stability_lab.config import ConfigError
from stability_lab.data.hf_tokenizer import _from_text
from stability_lab.data.tokens.formats import numpy_region
from stability_lab.disk.files import why_unreadable
from stability_lab.training.checkpoint import load_weights, put_weights, save_weights, weights_of

CPU = torch.device("cpu")


def test_no_sentence_is_the_first_line_of_a_librarys() -> None:
    package = Path(stability_lab.__file__).parent
    found = {
        path.name
        for path in package.rglob("*.py")
        if re.search(r"str\(error\)[^\n]*\.splitlines\(\)\[0\]", path.read_text())
    }
    assert found <= {"sources.py"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("model.d_model=64", r"blocks\.0\.\S+ has shape 64\S*, and 32\S* in the model"),
        ("model.n_layers=1", r"blocks\.1\.\S+ is missing, of shape \S+ in the model"),
        ("model.n_layers=3", r"blocks\.2\.\S+ of shape \S+ has no place in the model"),
        ("model.n_kv_heads=2", r"blocks\.0\.attn\.wk\.weight has shape 16x32, and 32x32 in the model"),
        ("+stabilizer=qknorm", r"blocks\.0\.attn\.\S+ of shape \d+ has no place in the model"),
    ],
)
def test_weights_of_another_model_are_told_by_tensor_and_shapes(
    tiny_run: Callable, tmp_path: Path, words: str, why: str
) -> None:
    model = tiny_run().model
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    save_weights(tiny_run(words).model, tmp_path / "other")
    with pytest.raises(ValueError, match=rf"other/model\.safetensors does not hold this model's weights: {why}$"):
        load_weights(model, tmp_path / "other", CPU)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(model).items())


def test_a_scalar_has_a_shape_too(tiny_run: Callable) -> None:
    model = tiny_run().model
    first = min(weights_of(model))
    with pytest.raises(ValueError, match=rf"^{re.escape(first)} has shape 0-d, and [\dx]+ in the model$"):
        put_weights(model, weights_of(model) | {first: torch.tensor(1.0)})


@pytest.mark.parametrize(
    ("read", "content", "why"),
    [
        (json.loads, b'{"a": 1,\n "b": }', "line 2, column 7 is not JSON"),
        (json.loads, b"", "line 1, column 1 is not JSON"),
        (json.loads, b"[" * 100_000, "it is nested too deeply"),
        (json.loads, b"caf\xe9", "byte 3 is not UTF-8"),
        (yaml.safe_load, b"a: 1\nb: [2", "line 2, column 6 is not YAML of plain values"),
        (yaml.safe_load, b"x: !!python/name:os.system a", "line 1, column 4 is not YAML of plain values"),
        (yaml.safe_load, b"\x00", "it holds characters or numbers that no such file can hold"),
        (json.loads, b"1" * 5000, "it holds characters or numbers that no such file can hold"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(read: Callable, content: bytes, why: str) -> None:
    with pytest.raises((ValueError, RecursionError, yaml.YAMLError)) as raised:
        read(content.decode())
    assert why_unreadable(raised.value) == why


def test_the_system_is_quoted_with_its_own_word() -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        Path("/nowhere/at/all").read_text()
    assert why_unreadable(raised.value) == "No such file or directory"
    assert why_unreadable(OSError()) == "the system refuses to read it"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1, column 2 is not JSON"),
        ("[]", "it is JSON of something else, or of another release of the package"),
        ('{"model": 3}', "it is JSON of something else, or of another release of the package"),
    ],
)
def test_a_tokenizer_file(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _from_text(text, "tokenizer.path=t.json", None, None)
    assert str(raised.value) == (
        f"tokenizer.path=t.json: is no tokenizer.json of the package tokenizers ({why}); "
        "give the file that its `save` writes"
    )


@pytest.mark.parametrize("kind", ["cut off", "objects", "no header"])
def test_a_numpy_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.array([{}]) if kind == "objects" else np.arange(1000))
    if kind != "objects":
        path.write_bytes(path.read_bytes()[: 200 if kind == "cut off" else 9])
    with pytest.raises(
        ConfigError, match=r"ids\.npy is a damaged \.npy file \(it is cut off, or holds Python objects\); w"
    ):
        numpy_region(path)


def test_a_tensor_that_nothing_can_count(tiny_config: Callable) -> None:
    with pytest.raises(ConfigError, match=r"model\.d_ff=\d+: no tensor can be that large; choose a smaller width$"):
        check([tiny_config(f"model.d_ff={2**62}")])


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("config.yaml", "seed: [", r"config\.yaml cannot be read: line 1, column 8 is not YAML of plain values$"),
        ("config.yaml", "\0", r"config\.yaml cannot be read: it holds characters"),
    ],
)
def test_a_run_whose_configuration_is_damaged(tmp_path: Path, name: str, content: str, why: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        main([f"resume={tmp_path}"])


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("first line\nsecond"), r"RuntimeError(first line\nsecond)"),
        (KeyError("a key"), "KeyError('a key')"),
        (ValueError(), "ValueError()"),
    ],
)
def test_a_job_of_a_sweep_that_ends_as_nobody_expects(
    error: Exception,
    shown: str,
    tiny_overrides: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("stability_lab.run.job.execute", broken)
    words = ["-m", *tiny_overrides, f"output_dir={tmp_path}", "group=sweep", "seed=0", "sweep.workers=1"]
    assert main(words) == 1
    (job,) = json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"))["jobs"]
    assert job["reason"] == f"an error that nothing here expects, {shown}"
