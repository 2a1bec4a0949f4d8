"""``python -m benchmarks proofs``: what certificates decide, by model, radius and method.

One row each: the share of images that are classified correctly, broken (with a counterexample that
passes the audit), proved and undecided, and seconds per image.
"""

from __future__ import annotations

import torch

import wball
from benchmarks.frame import Result, options
from wball.certificates import CertificateStatus


def main(arguments: list[str] | None = None) -> None:
    parser = options("proofs", __doc__)
    models = ["mnist-certified", "levine2020-mnist-flow-0.01"]
    parser.add_argument("--names", nargs="+", default=models, help="models to certify")
    parser.add_argument("--radii", type=float, nargs="+", default=[0.02, 0.05])
    parser.add_argument("--methods", nargs="+", default=["anchored"], help="certificates")
    parser.add_argument("--images", type=int, default=300, help="number of images")
    parser.add_argument("--time-limit", type=float, help="seconds per image, for `complete`")
    given = parser.parse_args(arguments)
    result = Result("proofs", given, images=given.images, time_limit=given.time_limit)
    for name in given.names:
        model = wball.load_model(name, root=given.models).to(given.device).eval()
        kind = str(wball.model_card(name)["dataset"])
        x, y = wball.load_dataset(kind, given.data) if given.data else wball.load_sample(kind)
        x, y = x[: given.images].to(given.device), y[: given.images].to(given.device)
        for eps in given.radii:
            for method in given.methods:
                if result.has(model=name, eps=eps, method=method):
                    continue
                ball, limit = wball.WassersteinBall(eps), {}
                if method == "complete" and given.time_limit is not None:
                    limit = {"time_limit": given.time_limit}
                found = wball.certify(model, x, y, ball, method, **limit)
                status = list(found.status)
                broken = [k for k, s in enumerate(status) if s is CertificateStatus.FALSIFIED]
                if broken:
                    report = wball.audit(ball, x[broken], found.counterexample[broken])
                    if not report.all_valid:
                        raise SystemExit(f"a counterexample is not in the ball: {report}")
                share = {s.name.lower(): status.count(s) / len(status) for s in CertificateStatus}
                with torch.no_grad():
                    clean = float((model(x).argmax(1) == y).double().mean())
                seconds = found.seconds.double()
                row = {"model": name, "eps": eps, "method": method, "clean": clean, **share}
                row["seconds_mean"] = float(seconds.mean())
                result.add(row | {"seconds_worst": float(seconds.max())})
