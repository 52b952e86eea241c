"""Whether the hub can be reached, said in a sentence and in seconds; access tokens stay out of it."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from stability_lab.data import network


def test_tokens_of_access_are_blotted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    error = network.hub_error("data.name=a/b", RuntimeError("401 for hf_secret\nmore"), True, "data=text")
    assert "hf_secret" not in str(error)
    assert "401 for ***" in str(error)


def test_a_saved_login_is_blotted_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "token").write_text("saved-by-login")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    other = "hf_" + "a1B2" * 8
    error = network.hub_error("data.name=a/b", RuntimeError(f"401: saved-by-login, {other}."), True, "data=text")
    assert "(401: ***, ***.)" in str(error)


def test_errors_of_the_network_are_told_from_others() -> None:
    class LocalEntryNotFoundError(Exception):
        pass

    def sentence(error: Exception, online: bool = True) -> str:
        return str(network.hub_error("data.name=a/b", error, online, "data=text"))

    wrapped = RuntimeError("no such dataset")
    wrapped.__cause__ = LocalEntryNotFoundError()
    busy, refused = RuntimeError("of the server"), RuntimeError("no access")
    busy.response, refused.response = SimpleNamespace(status_code=503), SimpleNamespace(status_code=401)  # pyright: ignore
    assert "cannot be reached" in sentence(busy)
    assert "no access" in sentence(refused)
    assert "cannot be reached" in sentence(httpx.RemoteProtocolError("Server disconnected"))
    assert "Timeout in its name" in sentence(RuntimeError("Timeout in its name"))
    assert "cannot be reached" in sentence(wrapped)
    assert "no such dataset" in sentence(RuntimeError("no such dataset"))
    assert "cannot be reached" in sentence(RuntimeError("no such dataset"), online=False)


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
