import logging

import pytest

from stability_lab.tracking.tracker import LocalTracking, Mirror, RunInfo


class Recorder:
    def __init__(self, fail_on=None, error: BaseException | None = None):
        self.id, self.hint, self.calls, self._fail_on = "abc", "see it", [], fail_on
        self._error = error or RuntimeError("gone\nsecond line")

    def _take(self, name):
        self.calls.append(name)
        if name == self._fail_on:
            raise self._error

    def log(self, rows):
        self._take("log")

    def event(self, event):
        self._take("event")

    def finish(self, summary, exit_code):
        self.hint = "seen"
        self._take("finish")


def test_local_tracking_has_no_mirror(tmp_path):
    tracker = LocalTracking().start(RunInfo("n", None, (), {}, tmp_path))
    tracker.log([{"step": 1}])
    tracker.event({"event": "spike"})
    tracker.finish({}, 0)
    assert tracker.id is None
    assert "\n" not in tracker.hint
    assert list(tmp_path.iterdir()) == []


def test_local_tracking_refuses_another_mode():
    with pytest.raises(ValueError, match=r"^mode is 'online'"):
        LocalTracking(mode="online")


def test_mirror_passes_everything_on():
    recorder = Recorder()
    mirror = Mirror(recorder)
    mirror.log([])
    mirror.event({})
    mirror.finish({}, 3)
    assert recorder.calls == ["log", "event", "finish"]
    assert (mirror.id, mirror.hint) == ("abc", "seen")


@pytest.mark.parametrize("fail_on", ["log", "event", "finish"])
def test_mirror_warns_once_and_drops_the_tracker(fail_on, caplog):
    recorder = Recorder(fail_on)
    mirror = Mirror(recorder)
    with caplog.at_level(logging.WARNING, logger="stability_lab"):
        for _ in range(2):
            mirror.log([])
            mirror.event({})
            mirror.finish({}, 0)
    assert recorder.calls[-1] == fail_on
    assert recorder.calls.count(fail_on) == 1
    assert len(caplog.records) == 1
    assert "RuntimeError: gone" in caplog.text
    assert "second line" not in caplog.text


def test_mirror_lets_ctrl_c_through():
    with pytest.raises(KeyboardInterrupt):
        Mirror(Recorder("log", KeyboardInterrupt())).log([])
