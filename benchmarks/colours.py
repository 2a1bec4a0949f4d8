"""``python -m benchmarks colours``: what it costs networks if mass may change its colour.

CIFAR-10 (``--data``), a standard network and one trained against moves inside channels. Robust
accuracy under one attack for several prices of a change (``GridCost(channel_cost=...)``; ``null``
forbids it), and how much of the attack's cost is spent on changes. ``<out>.png`` shows the curves,
and images that were broken at one radius without and with changes.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

import wball
from benchmarks.frame import Result, Row, options
from wball.zoo.architectures import build_model

NETWORKS = {
    "cifar10-small": ("standard", None),
    "cifar10-adversarial": ("robust", "cifar10-resnet18"),
}
PRICES = (None, 2.0, 1.0, 0.5, 0.1)
SHOWN = 6


def load(name: str) -> nn.Module:
    """A bundled network, or one of the folder ``models``."""
    architecture = NETWORKS[name][1]
    if architecture is None:
        return wball.load_model(name).eval()
    path = Path("models") / name / f"{name}.safetensors"
    return wball.load_weights(build_model(architecture), path).eval()


def attack(eps: float, price: float | None, version: str) -> wball.StandardAttack:
    ball = wball.WassersteinBall(eps, wball.GridCost(5, channel_cost=price))
    return wball.StandardAttack(ball, version=version)  # type: ignore[arg-type]


def changed(x: Tensor, z: Tensor) -> float:
    """The mean share of an image's mass that ends in another channel than it started in."""
    sums = (z - x).double().sum((2, 3))
    moved = 0.5 * sums.abs().sum(1) / x.double().flatten(1).sum(1).clamp(min=1e-30)
    return float(moved.mean()) if len(x) else 0.0


def draw(rows: list[Row], examples: list[Tensor], eps: float, price: float, path: Path) -> None:
    """Curves of each network, and examples: the image, without and with changes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2 if examples else 0.01))
    axes = top.subplots(1, len(NETWORKS), sharey=True)
    for axis, (name, (kind, _)) in zip(axes, NETWORKS.items(), strict=True):
        for fee in PRICES:
            found = sorted(
                (r["eps"], 100 * r["robust"])
                for r in rows
                if r["model"] == name and r["channel_cost"] == fee
            )
            label = "inside channels" if fee is None else f"channel_cost={fee:g}"
            axis.plot(*zip(*found, strict=True), marker="o", label=label) if found else None
        axis.set(title=f"{name} ({kind})", xlabel="eps", xscale="log", ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("robust accuracy, %")
    axes[-1].legend()
    if examples:
        captions = ("image", "inside channels", f"channel_cost={price:g}")
        bottom.suptitle(f"{next(iter(NETWORKS))}: broken at eps {eps:g}", fontsize=10)
        grid = bottom.subplots(len(captions), len(examples[0]), squeeze=False)
        for line, caption, images in zip(grid, captions, examples, strict=True):
            for axis, image in zip(line, images, strict=True):
                axis.imshow(image.permute(1, 2, 0).clamp(0, 1).cpu())
                axis.set(xticks=[], yticks=[])
            line[0].set_ylabel(caption, rotation=0, ha="right", va="center")
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = options("colours", __doc__)
    parser.add_argument("--images", type=int, default=1000, help="number of test images")
    parser.add_argument(
        "--eps", type=float, nargs="+", default=[0.001, 0.002, 0.005, 0.01, 0.02, 0.05]
    )
    parser.add_argument("--version", default="standard", choices=["standard", "fast"])
    parser.add_argument("--shown", type=float, default=0.005, help="radius of the examples")
    given = parser.parse_args(arguments)
    if given.data is None:
        parser.error("--data: the folder with CIFAR-10 (wball data cifar10)")
    result = Result("colours", given, images=given.images, version=given.version)
    x, y = (v[: given.images].to(given.device) for v in wball.load_dataset("cifar10", given.data))
    for name, (kind, _) in NETWORKS.items():
        model = load(name).to(given.device)
        for eps in given.eps:
            for price in PRICES:
                key: Row = {"model": name, "kind": kind, "eps": eps, "channel_cost": price}
                if not result.has(**key):
                    method = attack(eps, price, given.version)
                    found = method(model, x, y)
                    broken = found.success & found.distance.isfinite()
                    z = found.images[broken]
                    valid = bool(wball.audit(method.ball, x[broken][:50], z[:50]).all_valid)
                    share = changed(x[broken], z)
                    result.add(
                        {**key, "robust": found.robust_accuracy, "changed": share, "valid": valid}
                    )
    model, some = load("cifar10-small").to(given.device), min(60, len(x))
    fee = 0.5
    pair = [attack(given.shown, p, "fast")(model, x[:some], y[:some]) for p in (None, fee)]
    clean = pair[0].n_steps + pair[1].n_steps > 0
    both = (pair[0].success & pair[1].success & clean).nonzero()[:, 0]
    both = both[:SHOWN]
    examples = [x[both], *(found.images[both] for found in pair)] if len(both) else []
    draw(result.rows, examples, given.shown, fee, result.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
