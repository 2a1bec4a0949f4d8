"""Kernels: the inner loops, each with the same signature as its readable version in :mod:`wball.kernels.reference`."""

from wball.kernels.reference import EntropicPlan, entropic_plan, entropic_plan_dense

__all__ = ["EntropicPlan", "entropic_plan", "entropic_plan_dense"]
