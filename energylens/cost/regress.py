"""Gaussian-process regressors, evaluated with NumPy alone.

A regressor predicts log(measurement / prior) from standardised features. It is kept as its
training points and hyper-parameters, not as a fitted object: the Cholesky factor is made when it
is first used, so that a bundle stays small, readable and independent of any library's version.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianProcess:
    """Constant mean, squared-exponential kernel with one length scale per feature, per-point noise.

    Attributes:
        x: training features, [points, features].
        y: training targets (natural log of a ratio), [points].
        noise: noise standard deviation of each point, [points].
        length: length scale of each feature, in the features' unit, [features].
        signal: standard deviation of the process.
        mean: constant mean of the targets.
    """

    x: Array
    y: Array
    noise: Array
    length: Array
    signal: float
    mean: float
    _inverse: list[Array] = field(default_factory=list, repr=False, init=False)
    _weights: list[Array] = field(default_factory=list, repr=False, init=False)

    def covariance(self, a: Array, b: Array) -> Array:
        """Prior covariance of the points ``a`` [n, features] and ``b`` [m, features], as [n, m]."""
        scaled_a, scaled_b = a / self.length, b / self.length
        square = (
            (scaled_a**2).sum(axis=1)[:, None]
            + (scaled_b**2).sum(axis=1)[None, :]
            - 2 * scaled_a @ scaled_b.T
        )
        cov: Array = self.signal**2 * np.exp(-0.5 * np.maximum(square, 0.0))
        return cov

    def _inverse_and_weights(self) -> tuple[Array, Array]:
        if not self._inverse:
            k = self.covariance(self.x, self.x) + np.diag(self.noise**2)
            self._inverse.append(np.linalg.inv(np.linalg.cholesky(k)))
        inverse = self._inverse[0]
        if not self._weights:
            self._weights.append(inverse.T @ (inverse @ (self.y - self.mean)))
        return inverse, self._weights[0]

    def retarget(self, y: Array) -> GaussianProcess:
        """The same process with other targets [points]; what does not depend on them is kept."""
        other = replace(self, y=y, mean=float(y.mean()))
        other._inverse.extend(self._inverse or [self._inverse_and_weights()[0]])
        return other

    def predict(self, x: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the noise-free target at ``x`` [n, features], each [n]."""
        inverse, weights = self._inverse_and_weights()
        cross = self.covariance(x, self.x)
        mean = self.mean + cross @ weights
        variance = self.signal**2 - ((cross @ inverse.T) ** 2).sum(axis=1)
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def deviations(self, groups: NDArray[np.int64], repeat_sd: float) -> Array:
        """How far each group of points, taken to be one and the same thing, lies off the process.

        The noise of the points is part real (the thing is as it is), part ``repeat_sd`` (it was
        measured once); the mean residual is shrunk by their proportion.

        Args:
            groups: number of each point's group, from 0, [points].
            repeat_sd: standard deviation of a repetition, in the targets' unit.

        Returns:
            [groups].
        """
        # At a training point, target minus mean is noise**2 times its weight.
        residual = self.noise**2 * self._inverse_and_weights()[1]
        points = np.bincount(groups)
        real = np.maximum(np.bincount(groups, self.noise**2) / points - repeat_sd**2, 0.0)
        share = real / (real + repeat_sd**2 / points)
        return np.asarray(share * np.bincount(groups, residual) / points)

    def leave_out(self, groups: NDArray[np.int64]) -> Array:
        """Residuals (target minus prediction) with each group of points left out in turn, [points].

        Closed form: with Q the inverse covariance of all points, the residuals of a left-out block
            B are
        inv(Q_BB) (Q (y - mean))_B (Rasmussen & Williams 2006, section 5.4.2, for blocks).
        """
        inverse, weights = self._inverse_and_weights()
        precision = inverse.T @ inverse
        residual = np.empty_like(self.y)
        for g in np.unique(groups):
            b = np.flatnonzero(groups == g)
            residual[b] = np.linalg.solve(precision[np.ix_(b, b)], weights[b])
        return residual

    def nearest(self, x: Array) -> Array:
        """Distance of each row of ``x`` to its nearest training point, in length scales, [n]."""
        scaled, known = x / self.length, self.x / self.length
        square = (
            (scaled**2).sum(axis=1)[:, None]
            + (known**2).sum(axis=1)[None, :]
            - 2 * scaled @ known.T
        )
        distance: Array = np.sqrt(np.maximum(square, 0.0).min(axis=1))
        return distance
