"""The small model and its images."""

from small_case import case, images, labels, net  # noqa: F401
