"""Student's t distribution, by numerical integration: numpy alone, to about 5 digits.

With x = sqrt(freedom) tan(angle) its density is that of cos(angle) to the power freedom - 1, which is bounded.
"""

from __future__ import annotations

from math import atan, pi, sqrt

import numpy as np

POINTS = 4001
REACH = 14.0
"""Standard deviations, of a distribution that is nearly normal, beyond which there is nothing."""
MOST_FREEDOM = 1e6


def compute_student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution with 1 or more degrees of freedom."""
    freedom = min(max(freedom, 1.0), MOST_FREEDOM)
    angles, cumulative = _integrate(freedom)
    return sqrt(freedom) * float(np.tan(np.interp(probability, cumulative, angles)))


def compute_student_tail(value: float, freedom: float) -> float:
    """Return the probability that Student's t is above a value of 0 or more."""
    freedom = min(max(freedom, 1.0), MOST_FREEDOM)
    angles, cumulative = _integrate(freedom)
    return float(np.interp(-atan(value / sqrt(freedom)), angles, cumulative))


def _integrate(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Return angles and the probability to be below each of them."""
    reach = min(pi / 2, REACH / sqrt(freedom))
    angles = np.linspace(-reach, reach, POINTS)
    density = np.cos(angles).clip(min=0.0) ** (freedom - 1)
    cumulative = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return angles, cumulative / cumulative[-1]
