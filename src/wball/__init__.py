"""wball: robustness of image classifiers to moved mass (small Wasserstein distance)."""

from wball.attacks import PGD, AttackResult, DualAveraging, FrankWolfe, StandardAttack, minimal_radius
from wball.audit import AuditReport, audit
from wball.ball import LinfBall, WassersteinBall
from wball.certify import CertificateResult, FlowSmoothing, certified_radius, certify, flow_noise
from wball.checkpoint import load_weights, save_weights
from wball.data import load_dataset, load_folder, load_sample, to_tensors
from wball.evaluate import Evaluation, evaluate, load_evaluation
from wball.fetch import download
from wball.ground import DenseCost, GridCost, StencilCost
from wball.models import Normalized, architectures, build_model
from wball.result import ProjectionResult, Status, SupportResult
from wball.zoo import list_models, load_model, model_card

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "CertificateResult",
    "FlowSmoothing",
    "DenseCost",
    "GridCost",
    "LinfBall",
    "Normalized",
    "ProjectionResult",
    "Status",
    "StencilCost",
    "SupportResult",
    "WassersteinBall",
    "architectures",
    "audit",
    "build_model",
    "certified_radius",
    "certify",
    "flow_noise",
    "Evaluation",
    "download",
    "evaluate",
    "load_evaluation",
    "list_models",
    "load_dataset",
    "load_folder",
    "load_model",
    "load_sample",
    "load_weights",
    "model_card",
    "save_weights",
    "to_tensors",
    "AttackResult",
    "DualAveraging",
    "FrankWolfe",
    "PGD",
    "StandardAttack",
    "minimal_radius",
]
