"""Forward and backward of single operations against torch's own or the obvious way, fp32 on CPU."""

import torch
import torch.nn.functional as F
from timing import interleaved, ratio
from torch import Tensor

from stability_lab.model.rope import rope_table, rotate
from stability_lab.numerics import rms_norm
from stability_lab.objective.loss import language_model_loss
from stability_lab.stabilizers.zloss import SquaredLogZ


def obvious_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b, c, s = x[..., :half], x[..., half:], cos[..., :half], sin[..., half:]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def main() -> None:
    torch.set_num_threads(2)
    x = torch.randn(16, 256, 8, 32, requires_grad=True)
    gain, grad = torch.ones(32, requires_grad=True), torch.randn(16, 256, 8, 32)
    cos, sin = rope_table(256, 32, 10_000.0)
    logits, targets = torch.randn(2048, 4096, requires_grad=True), torch.randint(4096, (2048,))
    inv_n = torch.tensor(1 / 2048)

    def naive_z_loss() -> None:
        z = logits.logsumexp(-1)
        (F.cross_entropy(logits, targets) + 1e-4 * z.square().mean()).backward()

    def our_z_loss() -> None:
        language_model_loss(logits, targets, inv_n, [SquaredLogZ(1e-4)]).objective.backward()

    pairs = {
        "rms_norm": (
            lambda: F.rms_norm(x, (32,), gain, 1e-6).backward(grad),
            lambda: rms_norm(x, gain, 1e-6).backward(grad),
        ),
        "rotate": (
            lambda: obvious_rotate(x, cos, sin).backward(grad),
            lambda: rotate(x, cos, sin).backward(grad),
        ),
        "cross-entropy": (
            lambda: F.cross_entropy(logits, targets).backward(),
            lambda: language_model_loss(logits, targets, inv_n).objective.backward(),
        ),
        "cross-entropy + z-loss": (naive_z_loss, our_z_loss),
    }
    for name, (reference, ours) in pairs.items():
        seconds = interleaved({"reference": reference, "ours": ours}, rounds=31)
        middle, low, high = ratio(seconds["reference"], seconds["ours"])
        print(f"{name:<24} {middle:.2f}x ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
