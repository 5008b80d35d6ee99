"""Mutants of boxcov rank: what to label or check first."""

from __future__ import annotations

from mutants.mutant import Mutant

ORDER = "evaluate/test_label_order.py::"
RANK = "cli/test_rank.py::"
LABELS = [
    Mutant(
        "the frame that pays most is ranked first",
        "pipeline/rank.py",
        "np.argsort(-np.asarray(values, dtype=float), kind=",
        "np.argsort(np.asarray(values, dtype=float), kind=",
        f"{RANK}test_frames_and_boxes_in_falling_order",
    ),
    Mutant(
        "an error to either side contradicts a label",
        "evaluate/label_order.py",
        "np.abs(records.as_axes().errors / records.scale)",
        "(records.as_axes().errors / records.scale)",
        f"{ORDER}test_error_counts_in_scales_not_in_metres",
    ),
    Mutant(
        "errors of labels count in the scales of the box",
        "evaluate/label_order.py",
        "errors / records.scale)",
        "errors / 0.1)",
        f"{ORDER}test_error_counts_in_scales_not_in_metres",
    ),
    Mutant(
        "disagreement without labels is refused",
        "pipeline/options/commands.py",
        'if self.by == "disagreement" and self.files.source is not None:',
        "if False:",
        f"{RANK}test_disagreement_needs_labels",
    ),
    Mutant(
        "risk without an error model is refused",
        "pipeline/rank.py",
        'if options.by != "epistemic" and not is_there:',
        "if False:",
        f"{RANK}test_epistemic_needs_no_error_model",
    ),
    Mutant(
        "the relative deviation has no unit",
        "evaluate/label_order.py",
        " / np.where(known, typical, 1))",
        ")",
        f"{ORDER}test_deviation_has_no_unit",
    ),
]
