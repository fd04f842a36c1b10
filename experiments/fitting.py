"""Least squares. Needs numpy."""
import numpy as np


def fit_polynomial(x, y, degree):
    """(coefficients, constant first; their standard errors; R^2)"""
    scale = np.abs(x).max() ** np.arange(degree + 1.0)
    terms = np.vander(x, degree + 1, increasing=True) / scale
    coefficients, *_ = np.linalg.lstsq(terms, y, rcond=None)
    rest = y - terms @ coefficients
    variances = rest @ rest / (len(y) - degree - 1) * np.linalg.inv(terms.T @ terms).diagonal()
    return coefficients / scale, variances**0.5 / scale, 1 - rest @ rest / ((y - y.mean()) @ (y - y.mean()))
