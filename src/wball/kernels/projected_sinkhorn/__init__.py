"""Projected Sinkhorn: the entropic projection with the box inside."""
