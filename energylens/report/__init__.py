"""Results as JSON documents for programs (DESIGN section 5) and as tables for people."""

from energylens.report.advice import (
    advice_document,
    advice_infeasible_document,
    advice_table,
)
from energylens.report.baseline import comparison_document, comparison_table
from energylens.report.facts import (
    doctor_document,
    doctor_text,
    facts_text,
    listing_document,
    listing_table,
    sweep_document,
    sweep_text,
)
from energylens.report.frontier import (
    figure,
    frontier_csv,
    frontier_document,
    frontier_infeasible_document,
    frontier_plot,
    frontier_table,
)
from energylens.report.page import frontier_page
from energylens.report.prediction import infeasible_document, prediction_document, prediction_table
from energylens.report.profile import profile_csv, profile_table
from energylens.report.service import serving_document, serving_infeasible_document, serving_table
from energylens.report.validation import validation_document, validation_table
from energylens.report.validation_page import validation_page, validation_plot

__all__ = [
    "advice_document",
    "advice_infeasible_document",
    "advice_table",
    "comparison_document",
    "comparison_table",
    "doctor_document",
    "doctor_text",
    "facts_text",
    "figure",
    "frontier_csv",
    "frontier_document",
    "frontier_infeasible_document",
    "frontier_page",
    "frontier_plot",
    "frontier_table",
    "infeasible_document",
    "listing_document",
    "listing_table",
    "prediction_document",
    "prediction_table",
    "profile_csv",
    "profile_table",
    "serving_document",
    "serving_infeasible_document",
    "serving_table",
    "sweep_document",
    "sweep_text",
    "validation_document",
    "validation_page",
    "validation_plot",
    "validation_table",
]
