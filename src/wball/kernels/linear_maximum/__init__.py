"""Linear functions over the ball without its box: ring maxima and the kink of a scalar function."""
