import errno
import json
import math
import os
import subprocess
import sys

import pytest

from stability_lab.tracking.run_files import RunFiles, read_rows


def test_rows_keep_order_and_nonfinite_values(tmp_path):
    files = RunFiles(tmp_path / "a" / "run")
    files.log_rows([{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": math.nan}])
    files.log_rows([])
    files.log_rows([{"step": 3, "train/loss": math.inf, "attn": -math.inf}])
    files.log_event({"event": "spike", "step": 3})
    path = files.path / "metrics.jsonl"
    # Read while the writer is still open: each call is flushed.
    assert path.read_text() == (
        '{"step": 1, "train/loss": 2.5}\n{"step": 2, "train/loss": NaN}\n'
        '{"step": 3, "train/loss": Infinity, "attn": -Infinity}\n'
    )
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    assert read_rows(files.path / "events.jsonl") == [{"event": "spike", "step": 3}]
    files.close()


def test_nothing_is_written_of_a_call_with_a_bad_row(tmp_path):
    files = RunFiles(tmp_path)
    with pytest.raises(TypeError):
        files.log_rows([{"step": 1}, {"step": object()}])
    files.log_rows([{"step": 1}])
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]
    files.close()


def test_close_then_append(tmp_path):
    for step in (1, 2):
        files = RunFiles(tmp_path)
        files.log_rows([{"step": step}])
        files.close()
        files.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize(("tail", "kept"), [('{"step": 2, "lo', []), ('{"step": 2}', [{"step": 2}]), ("{", [])])
def test_unfinished_last_line(tmp_path, tail, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + tail)
    assert read_rows(path) == [{"step": 1}, *kept]
    files = RunFiles(tmp_path)
    files.log_rows([{"step": 3}])
    files.close()
    assert read_rows(path) == [{"step": 1}, *kept, {"step": 3}]
    assert path.read_text().count("\n") == len(read_rows(path))


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_rows(path)


def test_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_killed_writer_leaves_whole_lines(tmp_path):
    script = (
        "import itertools, pathlib, sys\n"
        "from stability_lab.tracking.run_files import RunFiles\n"
        "files = RunFiles(pathlib.Path(sys.argv[1]))\n"
        "for i in itertools.count(1):\n"
        "    files.log_rows([{'step': i, 'pad': 'x' * 500}])\n"
        "    if i == 50: print('go', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
        child.kill()
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert len(steps) >= 50
    assert steps == list(range(1, len(steps) + 1))


def test_full_disk_raises_and_leaves_no_half_line(tmp_path, monkeypatch):
    files = RunFiles(tmp_path)
    files.log_rows([{"step": 1}])
    write = os.write

    def fill_up(descriptor, block):
        if len(block) > 5:
            return write(descriptor, block[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill_up)
        with pytest.raises(OSError, match="No space left"):
            files.log_rows([{"step": 2}])
    files.log_rows([{"step": 3}])
    files.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_real_enospc_propagates(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    files = RunFiles(tmp_path)
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is checked below)
        files.log_rows([{"step": 1}])
    assert caught.value.errno == errno.ENOSPC
    files.close()


def test_replaced_files_are_whole(tmp_path, monkeypatch):
    files = RunFiles(tmp_path)
    files.write_json("summary.json", {"status": "running", "loss": math.nan})
    files.write_text("config.yaml", "seed: 1\n")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "running"

    def no_rename(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", no_rename)
    with pytest.raises(OSError, match="No space left"):
        files.write_json("summary.json", {"status": "completed"})
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "running"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "summary.json",
    ]


@pytest.mark.parametrize("torn", ["", '{"step": 4, "lo'])
def test_rows_after_a_step_are_set_aside_and_none_is_lost(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    kept, rest = '{"step": 1}\n{"step": 2}\n', '{"step": 3}\n' + torn
    for number in (1, 2):
        path.write_text(kept + rest)
        aside = RunFiles(tmp_path).set_aside("metrics.jsonl", 2)
        assert aside is not None
        assert aside == tmp_path / f"metrics.jsonl.after-step-2-{number}"
        assert aside.read_text() == rest
        assert path.read_text() == kept
    files = RunFiles(tmp_path)
    assert files.set_aside("metrics.jsonl", 2) is None
    assert files.set_aside("events.jsonl", 2) is None
    files.log_rows([{"step": 3}])
    files.sync()
    files.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ["[1]", '{"step": "3"}', '{"step": null}', "{}", "\x00"])
def test_what_is_no_row_is_set_aside_too(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line + "\n")
    aside = RunFiles(tmp_path).set_aside("metrics.jsonl", 5)
    assert aside is not None
    assert aside.read_text() == line + "\n"


def test_events_that_are_replaced_can_be_appended_to(tmp_path):
    files = RunFiles(tmp_path)
    files.log_event({"event": "spike", "step": 1})
    files.replace_events([{"event": "spike", "step": 2}])
    files.log_event({"event": "spike", "step": 3})
    files.close()
    assert [event["step"] for event in read_rows(tmp_path / "events.jsonl")] == [2, 3]
