"""Gaussian processes against scikit-learn and against leaving points out for real."""

import numpy as np
import pytest

from energylens.cost.regress import GaussianProcess


def make(x, y, noise=0.05):
    return GaussianProcess(
        x=x, y=y, noise=np.full(len(y), noise), length=np.array([1.5, 0.7]), signal=0.8, mean=0.3
    )


@pytest.fixture
def data():
    rng = np.random.default_rng(7)
    x = rng.uniform(-2, 2, size=(25, 2))
    return x, np.sin(x[:, 0]) + 0.3 * x[:, 1] ** 2 + rng.normal(0, 0.05, 25)


def test_mean_and_deviation_are_those_of_scikit_learn(data):
    gpr = pytest.importorskip("sklearn.gaussian_process")
    kernels = pytest.importorskip("sklearn.gaussian_process.kernels")
    x, y = data
    kernel = kernels.ConstantKernel(0.64, "fixed") * kernels.RBF([1.5, 0.7], "fixed")
    reference = gpr.GaussianProcessRegressor(kernel, alpha=0.05**2, optimizer=None).fit(x, y - 0.3)
    at = np.array([[0.1, 0.2], [3.0, -1.0]])
    mean, sd = reference.predict(at, return_std=True)
    got_mean, got_sd = make(x, y).predict(at)
    np.testing.assert_allclose(got_mean, mean + 0.3, rtol=1e-9)
    np.testing.assert_allclose(got_sd, sd, rtol=1e-7)


def test_left_out_residuals_are_those_of_refits_without_the_group(data):
    x, y = data
    groups = np.arange(25) % 4
    got = make(x, y).leave_out(groups)
    for g in range(4):
        out = groups == g
        rest = make(x[~out], y[~out])
        np.testing.assert_allclose(got[out], y[out] - rest.predict(x[out])[0], rtol=1e-7)


def test_far_from_all_points_only_the_prior_is_left(data):
    x, y = data
    mean, sd = make(x, y).predict(np.array([[100.0, 100.0]]))
    assert mean[0] == pytest.approx(0.3)
    assert sd[0] == pytest.approx(0.8)
    assert make(x, y).nearest(x[:3]) == pytest.approx(np.zeros(3), abs=1e-6)


def test_deviations_are_mean_residuals_shrunk_by_what_repeats(data):
    x, y = data
    gp = make(x, y, noise=0.05)
    residual = y - gp.predict(x)[0]
    # Noise of 5 %, of which a measurement repeats to 1 %: 0.0024 of 0.0025 are the thing itself.
    groups = np.arange(25)
    groups[6] = 5
    groups[7:] -= 1
    found = gp.deviations(groups, repeat_sd=0.01)
    assert found[3] == pytest.approx(residual[3] * 0.0024 / (0.0024 + 0.0001))
    assert found[5] == pytest.approx(residual[5:7].mean() * 0.0024 / (0.0024 + 0.0001 / 2))
    assert gp.deviations(groups, repeat_sd=0.05) == pytest.approx(np.zeros(24))


def test_other_targets_give_what_a_new_process_would(data):
    x, y = data
    other = make(x, y).retarget(y**2)
    fresh = GaussianProcess(
        x=x, y=y**2, noise=np.full(25, 0.05), length=np.array([1.5, 0.7]), signal=0.8,
        mean=float((y**2).mean()),
    )  # fmt: skip
    np.testing.assert_allclose(other.predict(x[:5])[0], fresh.predict(x[:5])[0], rtol=1e-9)
