"""Complete verification: branch and bound over the signs of units, for every ball with an
input set."""

from wball.certificates.complete.nodes import Leaf
from wball.certificates.complete.search import Answer, Search

__all__ = ["Answer", "Leaf", "Search"]
