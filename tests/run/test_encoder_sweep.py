"""A sweep of stabilizers on an encoder: its runs are pairs, and `compare` reads them as it reads a decoder's."""

import json

import pytest


@pytest.mark.slow
def test_stabilizers_are_compared_on_an_encoder(run_command, tiny_overrides, tmp_path):
    words = (*tiny_overrides, "model=bert_mini", "objective=masked_lm", "trainer.max_steps=3", f"output_dir={tmp_path}")
    arms = ("none", "rmsnorm", "qknorm", "reordered_norm")
    swept = (f"+stabilizer={','.join(arms)}", "seed=0,1", "group=arms", "sweep.workers=1")
    shown = run_command("train", "-m", *words, *swept)
    assert shown.code == 0, shown.out + shown.err
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "arms").glob("*/manifest.json")]
    assert len(manifests) == 8
    for key in ("embed.weight", "head_transform.dense.weight", "blocks.1.attn.wq.weight"):
        assert len({manifest["init"][key] for manifest in manifests}) == 2  # one for each seed
    assert len({manifest["data"]["first_batch"] for manifest in manifests}) == 2
    shown = run_command("compare", str(tmp_path / "arms"))
    assert shown.code == 0, shown.out + shown.err
    assert "val/masked_ppl" in shown.out
    for arm in arms:
        assert arm in shown.out
    assert "runs of one seed are pairs" in shown.out
