"""The public names, from where they are defined. :mod:`wball` loads this module when the first of
them is used."""

# ruff: noqa: I001 - names of one module share an import

from wball.attacks import (
    PGD as PGD,
    AttackResult as AttackResult,
    DecisionSearch as DecisionSearch,
    DualAveraging as DualAveraging,
    FrankWolfe as FrankWolfe,
    ScoreSearch as ScoreSearch,
    StandardAttack as StandardAttack,
    minimal_radius as minimal_radius,
)
from wball.auditing.audit import AuditReport as AuditReport, audit as audit
from wball.ball import LinfBall as LinfBall, WassersteinBall as WassersteinBall
from wball.certificates import (
    CertificateResult as CertificateResult,
    FlowSmoothing as FlowSmoothing,
    certified_radius as certified_radius,
    certify as certify,
    flow_noise as flow_noise,
    verify as verify,
)
from wball.cost import DenseCost as DenseCost, GridCost as GridCost, StencilCost as StencilCost
from wball.data import (
    load_dataset as load_dataset,
    load_folder as load_folder,
    load_sample as load_sample,
    to_tensors as to_tensors,
)
from wball.evaluation import (
    Evaluation as Evaluation,
    Names as Names,
    Storage as Storage,
    evaluate as evaluate,
    explore as explore,
    load_evaluation as load_evaluation,
    merge_evaluations as merge_evaluations,
)
from wball.fetch import download as download
from wball.paper import (
    conjugate_sinkhorn as conjugate_sinkhorn,
    projected_sinkhorn as projected_sinkhorn,
)
from wball.report import write_report as write_report
from wball.result import (
    ProjectionResult as ProjectionResult,
    SinkhornResult as SinkhornResult,
    Status as Status,
    SupportResult as SupportResult,
)
from wball.storage.weights import load_weights as load_weights, save_weights as save_weights
from wball.training import train as train
from wball.zoo import (
    list_models as list_models,
    load_model as load_model,
    model_card as model_card,
    public_models as public_models,
)
from wball.zoo.architectures import (
    Binary as Binary,
    Normalized as Normalized,
    architectures as architectures,
    build_model as build_model,
)
