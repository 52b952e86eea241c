"""Whether the hub can be reached, said in a sentence and in seconds; access tokens stay out of it."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from stability_lab.data import network


def test_tokens_of_access_are_blotted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "use_hub", lambda: True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    error = network.hub_error("data.name=a/b", RuntimeError("401 for hf_secret\nmore"), "data=text")
    assert "hf_secret" not in str(error)
    assert "401 for ***" in str(error)


def test_a_saved_login_is_blotted_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(network, "use_hub", lambda: True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "token").write_text("saved-by-login")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    other = "hf_" + "a1B2" * 8
    error = network.hub_error("data.name=a/b", RuntimeError(f"401: saved-by-login, {other}."), "data=text")
    assert "(401: ***, ***.)" in str(error)


@pytest.mark.parametrize(
    ("answer", "sentence"), [(200, r"does not give it \(no such dataset\)"), (503, "cannot be reached")]
)
def test_whether_the_network_is_to_blame_is_asked(
    answer: int, sentence: str, monkeypatch: pytest.MonkeyPatch, server: Callable[[int | str], Any]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with server(answer) as host:
        monkeypatch.setenv("HF_ENDPOINT", host.url)
        error = network.hub_error("data.name=a/b", RuntimeError("\n no such dataset\nmore"), "data=text")
    assert re.search(rf"^data\.name=a/b: the hub {sentence}", str(error))


def test_errors_of_the_network_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that answers for every host is no way to the hub: then only the library's error tells."""
    monkeypatch.setattr(network, "use_hub", lambda: True)
    wrapped = RuntimeError("no such dataset")
    wrapped.__cause__ = LocalEntryNotFoundError("not in the cache")
    for error, expected in (
        (wrapped, "cannot be reached"),
        (httpx.RemoteProtocolError("Server disconnected"), "cannot be reached"),
        (httpx.ReadTimeout("late"), "cannot be reached"),
        (RuntimeError("Timeout in its text"), "does not give it (Timeout in its text)"),
    ):
        assert expected in str(network.hub_error("data.name=a/b", error, "data=text"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [["data=fineweb_edu"], ["tokenizer=hub", "tokenizer.name=gpt2"]])
@pytest.mark.parametrize("network_is", ["unknown", "switched off", 503, "close", "silence"])
def test_without_a_network_there_is_one_sentence_at_once(
    network_is: int | str, words: list[str], tmp_path: Path, server: Callable[[int | str], Any]
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret"}
    with contextlib.ExitStack() as stack:
        if network_is == "unknown":
            environment["HF_ENDPOINT"] = "http://10.255.255.1:81"
        elif network_is == "switched off":
            environment["HF_HUB_OFFLINE"] = "1"
        else:
            environment["https_proxy"] = stack.enter_context(server(network_is)).url
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "stability_lab", "train", *words, f"output_dir={tmp_path / 'out'}"],
            capture_output=True,
            text=True,
            env=environment,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the hub cannot be reached (no network leads there" in done.stderr
    assert "hf_secret" not in done.stderr + done.stdout
    assert not (tmp_path / "out").exists()
    assert time.monotonic() - started < 60  # on a busy machine too
