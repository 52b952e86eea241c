"""Loss and gradient norm of five steps, recorded: an unintended change of the numerics shows here.

After an intended one: `python tests/training/test_golden.py` writes golden.json anew; say why in the commit. The
tolerance covers other processors and torch releases; repeats on one machine are bit-equal (test_step.py).
"""

import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("golden.json")
CASES = {
    "baseline": (),
    "accumulated bf16": ("trainer.precision=bf16", "trainer.grad_accum_steps=2"),
    "gpt2-like": ("model.bias=true", "model.tied_head=true", "model.positions=learned", "model.init.scheme=gpt2"),
    "swiglu, grouped": ("model.mlp=swiglu", "model.n_kv_heads=2", "model.init.scheme=mitchell"),
    "all stabilizers": ("+stabilizer=[zloss,qknorm,rmsnorm]", "stabilizer.zloss.weight=1e-2"),
}
KEYS = ("train/loss", "optim/grad_norm")


@pytest.mark.parametrize("case", CASES)
def test_five_steps(case, tiny_run, train_steps):
    rows = train_steps(tiny_run(*CASES[case]), 5)
    measured = {key: [row[key] for row in rows] for key in KEYS}
    rtol = 1e-2 if "bf16" in case else 1e-4
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[case]
    assert golden.keys() == measured.keys()
    for key in KEYS:
        assert measured[key] == pytest.approx(golden[key], rel=rtol), key


def _record() -> None:
    import torch

    from stability_lab.build import build_run
    from stability_lab.command_line import read_command_line
    from stability_lab.compose import compose_jobs

    conftest: dict = {}
    exec((Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8"), conftest)
    golden = {}
    for case, overrides in CASES.items():
        (job,) = compose_jobs(read_command_line([*conftest["TINY"], *overrides]))
        run = build_run(job.config)
        size = job.config.trainer.micro_batch_size * job.config.trainer.grad_accum_steps
        rows = []
        for step in range(1, 6):
            windows = torch.from_numpy(run.sampler.batch((step - 1) * size, size))
            batch = run.objective.batch(windows, 0)
            rows.append(dict(zip(run.step.columns, run.step(batch, run.schedule.lr(step)).tolist(), strict=True)))
        golden[case] = {key: [round(row[key], 6) for row in rows] for key in KEYS}
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _record()
