"""Every table and figure of the paper, and the leaderboard, by one command each: ``wball reproduce``.

A recipe measures (:mod:`~wball.paper.measure`), writes ``NAME.json`` with everything that its figure needs, and is
drawn from that file alone, there or on another machine (:mod:`~wball.paper.run`).
"""
