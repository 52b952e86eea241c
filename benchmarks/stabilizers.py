"""A training step with each stabilizer against the baseline's, on CPU; `none@explicit` is the control for `softcap`."""

import argparse

import torch
from step import our_step
from timing import interleaved, ratio

from stability_lab.commands.stabilizers import stabilizers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="compile the whole step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokens = torch.randint(257, (16, 129), generator=torch.Generator().manual_seed(0))
    names = [row["name"] for row in stabilizers()]
    overrides = {name: [f"+stabilizer={name}"] for name in names} | {"none@explicit": ["model.attention=explicit"]}
    steps = {
        name: our_step(["model.vocab_size=257", *given], "full" if args.compile else "off")
        for name, given in overrides.items()
    }
    seconds = interleaved({name: (lambda f=f: f(tokens)) for name, f in steps.items()}, args.rounds)
    for name in steps:
        middle, low, high = ratio(seconds[name], seconds["none"])
        print(f"{name:<16} {middle:.3f} of the baseline's time ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
