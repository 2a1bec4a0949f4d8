"""Every table and figure of the paper, and the leaderboard, by one command each: ``python -m
reproduction``.

A recipe measures (:mod:`~reproduction.measure`), writes ``NAME.json`` with everything that its
figure needs, and is drawn from that file alone, there or on another machine
(:mod:`~reproduction.run`).
"""

from reproduction import networks as networks  # its networks are known by name
