"""What tests/run/test_ranks.py starts with torchrun: on every rank, for the engine that the first word names."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from stability_lab.build import build_run
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import TrainConfig, config_dir
from stability_lab.training.loop import Run
from stability_lab.training.ranks import ONE, Ranks, ranks_of

TINY = (
    *("model.d_model=32", "model.n_layers=2", "model.n_heads=4", "model.seq_len=16", "trainer.device=cpu"),
    *("trainer.micro_batch_size=4", "trainer.grad_accum_steps=2", "trainer.max_steps=4", "trainer.eval_sequences=4"),
    *("schedule.warmup_steps=2", "optimizer.lr=1e-2", "tracking=local"),
)


def config_of(*words: str) -> TrainConfig:
    (job,) = compose_jobs(read_command_line([*TINY, *words, f"trainer.parallel={sys.argv[1]}"]))
    return job.config


def step_of(run: Run, number: int) -> Tensor:
    n = 8
    own = run.ranks.part(n)
    windows = torch.from_numpy(run.sampler.batch((number - 1) * n, n))[own]  # one or two texts a sample
    return run.step(run.objective.batch(windows, own.start), 1e-2)


def weights(run: Run) -> list[Tensor]:
    whole = run.ranks.whole(dict(run.model.named_parameters()))
    return [weight.detach().clone() for weight in whole.values()]


def every_stabilizer(ranks: Ranks) -> None:
    """Each entry, and BERT's objective with two texts, two ranks against one process: rows and weights of three steps,
    to rounding."""
    names = sorted(path.stem for path in (config_dir() / "stabilizer").glob("*.yaml"))
    encoder = ("model=bert_mini", "model.n_layers=1", "model.dropout=0", "objective=masked_lm_nsp")
    for name, words in [*((name, (f"+stabilizer={name}",)) for name in names), ("encoder", encoder)]:
        config = config_of(*words)
        alone, together = build_run(config, ONE), build_run(config, ranks)
        for number in (1, 2, 3):
            expected, row = step_of(alone, number), step_of(together, number)
            torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        trained = ranks.whole(dict(together.model.named_parameters()))
        for key, a in alone.model.named_parameters():
            b = trained[key]
            torch.testing.assert_close(
                b, a, rtol=2e-3, atol=2e-4, msg=lambda m, key=key, name=name: f"{name} {key}: {m}"
            )


def nonfinite_on_one_rank(ranks: Ranks) -> None:
    """A NaN in the activations of rank 1 calls the step off on all: weights keep their bits."""
    run = build_run(config_of("stability.on_nonfinite=skip"), ranks)
    step_of(run, 1)
    before = weights(run)
    factor = torch.tensor(torch.nan if ranks.rank == 1 else 1.0)

    def poison(_: torch.nn.Module, __: object, x: Tensor) -> Tensor:
        return x * factor

    hook = run.model.embed.register_forward_hook(poison)
    row = dict(zip(run.step.columns, step_of(run, 2).tolist(), strict=True))
    hook.remove()
    assert row["bad"] == 1, row
    assert all(torch.equal(old, new) for old, new in zip(before, weights(run), strict=True))
    row = dict(zip(run.step.columns, step_of(run, 3).tolist(), strict=True))
    assert row["bad"] == 0, row
    assert not all(torch.equal(old, new) for old, new in zip(before, weights(run), strict=True))


def weights_stay_equal(ranks: Ranks) -> None:
    """After ten steps with dropout all ranks hold the same weights, though each drops others."""
    run = build_run(config_of("model.dropout=0.2"), ranks)
    drawn = torch.rand(4)
    all_drawn = [torch.empty(4) for _ in range(ranks.size)]
    dist.all_gather(all_drawn, drawn)
    assert not torch.equal(all_drawn[0], all_drawn[1])
    for number in range(1, 11):
        step_of(run, number)
    for weight in weights(run):
        low, high = weight.clone(), weight.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        assert torch.equal(low, high)


if __name__ == "__main__":
    with ranks_of(sys.argv[1], torch.device("cpu")) as joined:
        assert joined.size == 2
        for case in (every_stabilizer, nonfinite_on_one_rank, weights_stay_equal):
            case(joined)
        dist.barrier()
        os._exit(0)  # gloo's threads may abort a process that ends while another one still speaks to it
