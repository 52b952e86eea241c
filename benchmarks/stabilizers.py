"""A training step with each stabilizer against the baseline's, on a CPU; `none@explicit` is the control for `softcap`.

    python -m benchmarks.stabilizers                          eager, gpt_nano
    python -m benchmarks.stabilizers --compile full           compiled whole; minutes of compilation first
    python -m benchmarks.stabilizers --only softcap,zloss --shape goal

`together` holds one stabilizer of each kind: norm, attention logits, head.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks import timing
from benchmarks.step import SHAPES, our_step, shape_of
from benchmarks.timing import Group, group, interleaved, parser, run
from stability_lab.commands.stabilizers import stabilizers
from stability_lab.config import ConfigError
from stability_lab.text import did_you_mean

BASELINE, CONTROL = "none", "none@explicit"
TOGETHER = ("rmsnorm", "qknorm", "softcap", "zloss")


def measured(args: argparse.Namespace) -> Iterator[Group]:
    known = [row["name"] for row in stabilizers() if row["name"] != BASELINE]
    names = known if args.only is None else args.only.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name} is not a stabilizer: {did_you_mean(name, known)}")
    overrides = {
        BASELINE: [],
        CONTROL: ["model.attention=explicit"],
        **{name: [f"+stabilizer={name}"] for name in names},
        "together": [f"+stabilizer=[{','.join(TOGETHER)}]"],
    }
    shape = args.shape
    tokens = torch.randint(shape.vocab, (shape.batch, shape.seq_len + 1), generator=torch.Generator().manual_seed(0))
    steps = {name: our_step([*shape.overrides, *given], args.compile) for name, given in overrides.items()}
    seconds = interleaved(
        {name: (lambda f=f: f(tokens)) for name, f in steps.items()}, args.rounds, clock=timing.clock(args)
    )
    how = "eager" if args.compile == "off" else f"compiled ({args.compile})"
    yield group(f"A step with each stabilizer, {how}: {shape.words}", seconds, note=f"together: {', '.join(TOGETHER)}")


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.stabilizers", __doc__, rounds=15, quick={"shape": SHAPES["small"]})
    timing.add_cpu_time(made)
    made.add_argument("--compile", choices=("off", "block", "full"), default="off")
    made.add_argument("--only", metavar="A,B", help="some stabilizers (default: all)")
    made.add_argument("--shape", type=shape_of, default=SHAPES["gpt_nano"], metavar="SHAPE", help="as in step")
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
