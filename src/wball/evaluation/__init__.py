"""Evaluations: how robust a model is, as data that can be checked, resumed, compared and shown."""

from wball.evaluation.folder import OtherSettings
from wball.evaluation.merge import merge_evaluations
from wball.evaluation.options import Description, Running
from wball.evaluation.result import CurvePoint, Evaluation, load_evaluation
from wball.evaluation.run import evaluate
from wball.evaluation.trust import (
    Check,
    Decision,
    EvaluationWarning,
    Requirement,
    confidence_interval,
    exit_code,
)
from wball.storage.atomic import FolderInUse

__all__ = [
    "Check",
    "CurvePoint",
    "Decision",
    "Description",
    "Evaluation",
    "EvaluationWarning",
    "FolderInUse",
    "OtherSettings",
    "Requirement",
    "Running",
    "confidence_interval",
    "evaluate",
    "exit_code",
    "load_evaluation",
    "merge_evaluations",
]
