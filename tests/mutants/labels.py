"""Mutants of boxcov rank: what to label or check first."""

from __future__ import annotations

from mutants.mutant import Mutant

ORDER = "evaluate/test_label_order.py::"
WRONG = "evaluate/test_wrong_labels.py::"
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
        "errors of labels count in the scales of the box",
        "evaluate/wrong_labels.py",
        "stats.t.logpdf(errors / scale, ",
        "stats.t.logpdf(errors / 0.1, ",
        f"{WRONG}test_error_counts_in_scales_not_in_metres",
    ),
    Mutant(
        "a label takes a near box rather than a surer one",
        "evaluate/label_pairs.py",
        "np.where(distance < LIMIT, np.exp(-distance), 0.0)",
        "np.where(distance < LIMIT, 1.0, 0.0)",
        f"{WRONG}test_near_box_is_taken_rather_than_a_surer_one",
    ),
    Mutant(
        "boxes at one place are one finding",
        "evaluate/label_pairs.py",
        "kept[i] = not row[kept].any()",
        "kept[i] = True",
        f"{WRONG}test_boxes_at_one_place_are_one_finding",
    ),
    Mutant(
        "a label does not make its own size usual",
        "evaluate/wrong_labels.py",
        "is_other = rows[:, None] != members",
        "is_other = rows[:, None] >= 0 * members",
        f"{WRONG}test_density_of_sides_by_hand",
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
