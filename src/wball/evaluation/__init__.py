"""Evaluations: how robust a model is, as data that can be checked, resumed, compared and shown."""

from wball.evaluation.exhibit import explore
from wball.evaluation.merge import merge_evaluations
from wball.evaluation.requirements import (
    Check,
    Comparison,
    Decision,
    Requirement,
    confidence_interval,
)
from wball.evaluation.result import (
    AccuracyCurve,
    CurvePoint,
    Evaluation,
    EvaluationWarning,
    exit_code,
    load_evaluation,
)
from wball.evaluation.run import Names, OtherSettings, Storage, evaluate
from wball.storage.files import FolderInUse

__all__ = [
    "Check",
    "Comparison",
    "CurvePoint",
    "Decision",
    "AccuracyCurve",
    "Evaluation",
    "EvaluationWarning",
    "FolderInUse",
    "Names",
    "OtherSettings",
    "Requirement",
    "Storage",
    "confidence_interval",
    "evaluate",
    "explore",
    "exit_code",
    "load_evaluation",
    "merge_evaluations",
]
