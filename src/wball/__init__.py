# ruff: noqa: F405
"""wball: Wasserstein adversarial robustness of image classifiers.

The public names come from ``_api.py`` (add new ones there and to ``__all__``). It is imported when
the first of them is used, so that ``wball --help`` need not wait for torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wball.lazy import submodules

if TYPE_CHECKING:
    from wball._api import *  # noqa: F403

__version__ = "0.1.0"

# Read when torch is loaded. Waiting threads then do not spin, which halves the time when other
# work shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "AuditReport",
    "CertificateResult",
    "FlowSmoothing",
    "DenseCost",
    "GridCost",
    "LinfBall",
    "Binary",
    "Normalized",
    "ProjectionResult",
    "SinkhornResult",
    "Status",
    "StencilCost",
    "SupportResult",
    "WassersteinBall",
    "architectures",
    "audit",
    "build_model",
    "conjugate_sinkhorn",
    "projected_sinkhorn",
    "certified_radius",
    "certify",
    "flow_noise",
    "verify",
    "Evaluation",
    "Names",
    "Storage",
    "download",
    "evaluate",
    "explore",
    "write_report",
    "load_evaluation",
    "merge_evaluations",
    "list_models",
    "load_dataset",
    "load_folder",
    "load_model",
    "load_sample",
    "load_weights",
    "model_card",
    "public_models",
    "save_weights",
    "to_tensors",
    "train",
    "AttackResult",
    "DecisionSearch",
    "DualAveraging",
    "FrankWolfe",
    "PGD",
    "ScoreSearch",
    "StandardAttack",
    "minimal_radius",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        return submodules(__name__)(name)
    api = import_module("wball._api")
    globals().update({key: getattr(api, key) for key in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
