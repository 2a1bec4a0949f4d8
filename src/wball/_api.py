"""The public names, from where they are defined. :mod:`wball` loads this module when the first of
them is used."""

import wball.report  # noqa: F401 (Evaluation.report needs it)
from wball.attacks import PGD as PGD
from wball.attacks import AttackResult as AttackResult
from wball.attacks import DecisionSearch as DecisionSearch
from wball.attacks import DualAveraging as DualAveraging
from wball.attacks import FrankWolfe as FrankWolfe
from wball.attacks import ScoreSearch as ScoreSearch
from wball.attacks import StandardAttack as StandardAttack
from wball.attacks import minimal_radius as minimal_radius
from wball.auditing.audit import AuditReport as AuditReport
from wball.auditing.audit import audit as audit
from wball.ball import LinfBall as LinfBall
from wball.ball import WassersteinBall as WassersteinBall
from wball.certificates import CertificateResult as CertificateResult
from wball.certificates import FlowSmoothing as FlowSmoothing
from wball.certificates import certified_radius as certified_radius
from wball.certificates import certify as certify
from wball.certificates import flow_noise as flow_noise
from wball.certificates import verify as verify
from wball.cost import DenseCost as DenseCost
from wball.cost import GridCost as GridCost
from wball.cost import StencilCost as StencilCost
from wball.data import load_dataset as load_dataset
from wball.data import load_folder as load_folder
from wball.data import load_sample as load_sample
from wball.data import to_tensors as to_tensors
from wball.evaluation import Evaluation as Evaluation
from wball.evaluation import evaluate as evaluate
from wball.evaluation import load_evaluation as load_evaluation
from wball.evaluation import merge_evaluations as merge_evaluations
from wball.fetch import download as download
from wball.result import ProjectionResult as ProjectionResult
from wball.result import Status as Status
from wball.result import SupportResult as SupportResult
from wball.storage.weights import load_weights as load_weights
from wball.storage.weights import save_weights as save_weights
from wball.zoo import list_models as list_models
from wball.zoo import load_model as load_model
from wball.zoo import model_card as model_card
from wball.zoo import public_models as public_models
from wball.zoo.architectures import Normalized as Normalized
from wball.zoo.architectures import architectures as architectures
from wball.zoo.architectures import build_model as build_model
